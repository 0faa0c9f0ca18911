"""CUDA's own headers: where they are found, and the error message if one is missing."""

from pathlib import Path

import pytest

import kcache
from kcache.nvrtc import cuda_headers
from kcache.nvrtc.library import Library

SOURCE = "#include <cuda/std/cstdint>\n__global__ void k(cuda::std::uint32_t* x) { *x = 1; }\n"
SM_90 = kcache.CompileOptions(arch="sm_90")


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all installed CUDA headers unavailable."""
    monkeypatch.setattr(cuda_headers, "_folders", lambda: iter(()))


@pytest.mark.usefixtures("nvrtc")
def test_a_kernel_compiles_with_the_paths_that_are_found(cccl: Path) -> None:
    paths = kcache.include_paths()
    assert any(cccl.samefile(path) for path in paths)
    assert kcache.compile_to_ptx(SOURCE, SM_90.replace(include_paths=paths))[0]


@pytest.mark.usefixtures("nvrtc")
def test_a_header_that_was_not_found_is_named_with_its_place(cccl: Path) -> None:
    for name in ("cuda/std/cstdint", "cub/cub.cuh"):
        with pytest.raises(kcache.CompileError) as raised:
            kcache.compile_to_ptx(f"#include <{name}>", SM_90)
        found = cuda_headers.folder_of(name)
        assert found is not None
        assert cccl.samefile(found)
        how = "include_paths=kcache.include_paths() or --cuda-headers"
        assert raised.value.hint == f"pass -I {found} ({how})"
        assert raised.value.hint in str(raised.value)


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize(
    ("header", "package"),
    [
        ("cuda_fp16.h", "nvidia-cuda-runtime"),
        ("cooperative_groups.h", "nvidia-cuda-runtime"),
        ("cub/block/block_reduce.cuh", "nvidia-cuda-cccl"),
        ("cuda/std/array", "nvidia-cuda-cccl"),
        ("nv/target", "nvidia-cuda-cccl"),
        ("curand_kernel.h", "nvidia-curand"),
    ],
)
def test_packages_are_named(header: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kcache.include_paths() == ()
    for library, name in (("libnvrtc.so.13", package), ("libnvrtc.so.12", f"{package}-cu12")):
        found = Library(library, "")
        monkeypatch.setattr("kcache.nvrtc.library.find", lambda found=found: found)
        for verb in ("could not", "cannot"):
            hint = cuda_headers.hint(f'k.cu(1): error: {verb} open source file "{header}"')
            assert hint.startswith(f"pip install {name}, and pass include_paths=kcache.include")


@pytest.mark.usefixtures("nowhere")
def test_headers_of_others_and_other_errors_get_no_hint() -> None:
    for log in ('could not open source file "mine/cuda.h"', "error: expected a ;", ""):
        assert cuda_headers.hint(log) == ""


@pytest.mark.parametrize("layout", ["include/{}", "targets/x86_64-linux/include/{}"])
@pytest.mark.parametrize("cccl_folder", ["", "cccl/"])
def test_a_toolkit_has_them(
    layout: str, cccl_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cuda_fp16.h", f"{cccl_folder}cuda/std/cstddef"):
        header = tmp_path / layout.format(name)
        header.parent.mkdir(parents=True, exist_ok=True)
        header.touch()
    monkeypatch.setattr("kcache.nvrtc.library.find", lambda: None)
    monkeypatch.setattr("kcache.nvrtc.library.site_packages", list)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    include = tmp_path / layout.format("")
    both = (str(include / cccl_folder).rstrip("/"), str(include))
    assert tuple(map(Path, kcache.include_paths())) == tuple(dict.fromkeys(map(Path, both)))
