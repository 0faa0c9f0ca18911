"""Names of sources: the last part is in the key; the directory is treated like an include path."""

from pathlib import Path
from typing import Any

import pytest
from nvrtc.reference import agreed, compile_fresh

import kcache

pytestmark = pytest.mark.usefixtures("nvrtc")

ARCH = kcache.CompileOptions(arch="compute_90")
SOURCES: dict[str, str] = {
    "plain": "__global__ void f(int* p) { *p = 1; }",
    "header": '#include "n.h"\n__global__ void f(int* p) { *p = N; }',
    "static variable": "static __device__ int s; __global__ void f(int* p) { *p = s++; }",
    "__FILE__": "__device__ const char* n = __FILE__; "
    "__global__ void f(const char** p) { *p = n; }",
    "__FILE__ and a header": '#include "n.h"\n__device__ const char* n = __FILE__; '
    "__global__ void f(const char** p) { *p = n + N; }",
    "size of __FILE__": "__global__ void f(int* p) { *p = sizeof(__FILE__); }",
    "assert": "__global__ void f(int* p) { assert(*p); }",
    "internal linkage": "static __device__ __noinline__ int g(int a) { return a * a; } "
    "__global__ void f(int* p) { *p = g(*p); }",
}


@pytest.fixture
def project(tree: Path) -> Path:
    (tree / "include").mkdir()
    (tree / "include" / "n.h").write_text("#define N 3\n")
    (tree / "elsewhere").mkdir()
    return tree


def outputs(kernel: kcache.CompiledKernel) -> tuple[Any, ...]:
    return kernel.ptx, kernel.cubin, dict(kernel.lowered_names), kernel.log


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_source_of_another_name_is_compiled(source: str, project: Path) -> None:
    options = ARCH.replace(include_paths=["include"])
    with kcache.KernelCache(project / "cache") as cache:
        cache.get_or_compile(source, options=options, source_name="k.cu")
        found = cache.why(source, options=options, source_name="kernel.cu")
        assert {cause.kind for cause in found.causes} == {"source_name"}, found
        other = cache.get_or_compile(source, options=options, source_name="kernel.cu")
        assert not other.cached
        for name in ("k.cu", "kernel.cu"):
            assert cache.why(source, options=options, source_name=name).hit
            assert cache.get_or_compile(source, options=options, source_name=name).cached
    with kcache.KernelCache(disable=True) as none:
        clean = none.get_or_compile(source, options=options, source_name="kernel.cu")
    assert outputs(clean) == outputs(other)


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_directory_in_the_name_binds_only_outputs_that_show_it(
    source: str, project: Path
) -> None:
    options = ARCH.replace(include_paths=["include"])
    shows = "n = __FILE__" in source or "assert" in source
    with kcache.KernelCache(project / "cache") as cache:
        for name in ("k.cu", "elsewhere/k.cu", "some/where/k.cu", f"{project}/k.cu"):
            cache.get_or_compile(source, options=options, source_name=name)
            assert cache.get_or_compile(source, options=options, source_name=name).cached
            if "sizeof" not in source:  # sizeof keeps the value of the first place
                agreed(cache, source, options, source_name=name)
        # Whether the name has a directory is in the key; whether the directory exists is not.
        assert cache.stats().compiles == (4 if shows else 3)
        assert cache.get_or_compile(source, options=options, source_name="k.cu").cached


@pytest.mark.parametrize("name", ["-x.cu", "--version", "--", "__nv_name_map", "sub/__nv_x.cu"])
def test_a_name_that_nvrtc_takes_for_something_else(name: str, project: Path) -> None:
    with kcache.KernelCache(project / "cache") as cache:
        for _ in range(2):
            judged = compile_fresh(SOURCES["plain"], ARCH.flags(), source_name=name)
            if judged.failed:
                with pytest.raises(kcache.CompileError):
                    cache.get_or_compile(SOURCES["plain"], options=ARCH, source_name=name)
            else:
                found = cache.get_or_compile(SOURCES["plain"], options=ARCH, source_name=name)
                assert (found.ptx, found.cached) == (judged.ptx, False)
        assert cache.entry_count == 0


def test_a_source_that_includes_itself_by_its_name(project: Path) -> None:
    """The compiler includes the source from memory, but under another name it reads the file."""
    source = (
        '#ifndef ONCE\n#define ONCE\n#include "elsewhere/k.cu"\n#else\n'
        "__global__ void f(int* p) { *p = 1; }\n#endif\n"
    )
    (project / "elsewhere" / "k.cu").write_text("__global__ void f(int* p) { *p = 2; }\n")
    with kcache.KernelCache(project / "cache") as cache:
        for name in ("elsewhere/k.cu", f"{project}/k.cu", "elsewhere/k.cu"):
            agreed(cache, source, ARCH, source_name=name)


def test_a_name_expression_that_asks_for_the_name_of_the_source(project: Path) -> None:
    source = "template <int M> __global__ void k(int* out) { *out = M; }"
    for begin in ("", '#include "include/n.h"\n'):
        with kcache.KernelCache(project / "cache") as cache:
            for name in ("k.cu", "kernel.cu"):
                agreed(cache, begin + source, ARCH, ["k<sizeof(__BASE_FILE__)>"], source_name=name)


def test_a_name_under_which_the_source_is_one_of_its_headers_is_looked_at(project: Path) -> None:
    source = '#pragma once\n#include "k.cu"\n__global__ void f(int* p) { *p = 1; }'
    (project / "k.cu").write_text("#define X 1\n")
    with kcache.KernelCache(project / "cache") as cache:
        first = cache.get_or_compile(source, options=ARCH, source_name="kernel.cu")
        assert first.dependencies == (str(project / "k.cu"),)
        # With that name, the compiler includes the source itself instead of the file.
        assert not cache.why(source, options=ARCH, source_name="k.cu").hit
        with pytest.raises(kcache.CompileError, match="already been defined"):
            cache.get_or_compile(source, options=ARCH, source_name="k.cu")


# -- a file as the source ------------------------------------------------------------------------


def test_a_path_gives_the_source_and_the_directory_of_quoted_headers(project: Path) -> None:
    (project / "src").mkdir()
    (project / "src" / "k.cu").write_text(SOURCES["header"])
    (project / "src" / "n.h").write_text("#define N 4\n")
    path = Path("src/k.cu")
    with kcache.KernelCache(project / "cache") as cache:
        first = cache.get_or_compile(path, options=ARCH)
        assert first.dependencies == (str(project / "src" / "n.h"),)
        assert cache.get_or_compile(path, options=ARCH).cached
        assert cache.lookup(path, options=ARCH) is not None
        assert cache.why(path, options=ARCH).hit
        (again,) = cache.compile_many([kcache.CompileRequest(path, (), ARCH)])
        assert isinstance(again, kcache.CompiledKernel)
        assert (again.cached, again.key) == (True, first.key)
        path.write_text(SOURCES["header"].replace("N;", "N + 1;"))
        assert not cache.get_or_compile(path, options=ARCH).cached
        (project / "src" / "n.h").write_text("#define N 5\n")
        assert not cache.get_or_compile(path, options=ARCH).cached


@pytest.mark.parametrize(
    "name",
    ["../src/k.cu", "./sub/k.cu", "sub//k.cu", "sub/../k.cu", "none/k.cu", "x" * 300 + ".cu"],
)
def test_odd_names_are_cached(name: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("src", "work/sub"):
        (project / folder).mkdir(parents=True)
        (project / folder / "k.cu").touch()
    monkeypatch.chdir(project / "work")
    with kcache.KernelCache(project / "cache") as cache:
        for cached in (False, True):
            found = cache.get_or_compile(SOURCES["plain"], options=ARCH, source_name=name)
            assert found.cached == cached


def test_an_unreadable_path_is_an_error(project: Path) -> None:
    (project / "no.cu").write_bytes(b"\xff\xfe")
    with kcache.KernelCache(project / "cache") as cache:
        with pytest.raises(FileNotFoundError):
            cache.get_or_compile(Path("none.cu"), options=ARCH)
        with pytest.raises(kcache.ConfigError, match=r"no.cu is not text: byte 0 is 0xff"):
            cache.get_or_compile(Path("no.cu"), options=ARCH)
