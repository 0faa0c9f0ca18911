"""NVRTC's own headers (`--use-bundled-headers`): installed and searched as NVRTC does it."""

import shutil
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest
from nvrtc.reference import ARCH, compile_clean, write

import kcache
from kcache.nvrtc.options import parse_options

OPTION = "--use-bundled-headers="
SOURCE = """
#include <cuda_fp16.h>
#include <cuda/std/cstdint>
#include "mine.h"
__global__ void k(__half* x, cuda::std::uint32_t n) { x[n] = __float2half(MINE); }
"""


@pytest.fixture(autouse=True)
def _has_them(nvrtc: tuple[int, int]) -> None:
    if nvrtc < (13, 3):
        pytest.skip(f"NVRTC {nvrtc} has no bundled headers")


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[..., kcache.CompiledKernel]:
    """A function that compiles in the directory of the test, with a cache there."""
    write(tmp_path / "last/mine.h", "#define MINE 1\n")

    def compiled(folder: str, source: str = SOURCE) -> kcache.CompiledKernel:
        options = ARCH.replace(extra_options=["-Ifirst", f"{OPTION}{folder}", "-I", "last"])
        with chdir(tmp_path), kcache.KernelCache(tmp_path / "cache") as cache:
            return cache.get_or_compile(source, options=options)

    return compiled


def test_a_miss_installs_them_and_then_any_directory_with_them_hits(
    compiled: Callable[..., kcache.CompiledKernel], tmp_path: Path
) -> None:
    first = compiled("headers")
    assert not first.cached
    assert (tmp_path / "headers" / "cccl").is_dir()
    flags = [*ARCH.flags(), "-Ifirst", f"{OPTION}other", "-I", "last"]
    with chdir(tmp_path):
        bare = compile_clean(SOURCE, flags)
    assert (first.ptx, first.cubin) == (bare.ptx, bare.cubin)
    for folder in ("headers", "other", str(tmp_path / "other")):
        again = compiled(folder)
        assert (again.cached, again.cubin) == (True, first.cubin)

    write(tmp_path / "first/cuda_fp16.h", "#include <mine.h>\n#error the first one counts\n")
    with pytest.raises(kcache.CompileError, match="the first one counts"):
        compiled("headers")
    shutil.rmtree(tmp_path / "first")
    write(tmp_path / "last/cuda_fp16.h", "#error the last one counts\n")
    assert compiled("headers").cached


def test_where_they_are_missing_they_are_installed_whatever_the_source_reads(
    compiled: Callable[..., kcache.CompiledKernel], tmp_path: Path
) -> None:
    alone = "__global__ void k(int* x) { *x = 1; }"
    assert not compiled("headers", alone).cached
    assert compiled("headers", alone).cached
    shutil.rmtree(tmp_path / "headers")
    assert not compiled("headers", alone).cached
    assert (tmp_path / "headers" / "cuda_fp16.h").is_file()


def test_a_directory_of_another_release_is_nvrtcs_error(
    compiled: Callable[..., kcache.CompiledKernel], tmp_path: Path
) -> None:
    compiled("headers")
    marker = tmp_path / "headers" / ".nvrtc_headers_version"
    marker.write_text(marker.read_text().replace("cuda_minor=", "cuda_minor=9"))
    with pytest.raises(kcache.CompileError, match="headers version mismatch"):
        compiled("headers", SOURCE + "// another source")
    assert "cuda_minor=9" in marker.read_text()
    (tmp_path / "file").touch()
    with pytest.raises(kcache.CompileError, match="Not a directory"):
        compiled("file")


@pytest.mark.parametrize("odd", ["", " a", "a/", "a b", "="])
def test_unusual_directories_are_not_followed(odd: str) -> None:
    assert parse_options([f"{OPTION}{odd}"]).include_paths == ()


def test_the_directories_are_those_of_the_search() -> None:
    options = parse_options(["-Ia", f"{OPTION}b", "-Ic"])
    assert options.include_paths == ("a", "b", "b/cccl", "c")
    assert options.with_bundled_as_plain() == ("-Ia", "-Ib", "-Ib/cccl", "-Ic")
    assert options.with_include_paths("wxyz") == ("-Iw", f"{OPTION}x", "-Iz")
