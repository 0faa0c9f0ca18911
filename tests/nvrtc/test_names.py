"""What a source is called separates kernels only where an output shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nvrtc.reference import agreed

import kcache

pytestmark = pytest.mark.usefixtures("nvrtc")

ARCH = kcache.CompileOptions(arch="compute_90")
#: The outcome shows nothing of the name; with the headers that it includes.
ALIKE: dict[str, str] = {
    "plain": "__global__ void f(int* p) { *p = 1; }",
    "template": "template <class T> __global__ void f(T* p) { *p = 1; }",
    "static variable": "static __device__ int s; __global__ void f(int* p) { *p = s++; }",
    "header": '#include "n.h"\n__global__ void f(int* p) { *p = N; }',
}
#: It shows the name, or may depend on it.
NAMED: dict[str, str] = {
    "__FILE__": "__device__ const char* n = __FILE__; "
    "__global__ void f(const char** p) { *p = n; }",
    "size of __FILE__": "__global__ void f(int* p) { *p = sizeof(__FILE__); }",
    "assert": "__global__ void f(int* p) { assert(*p); }",
    "text of an assert and header": '#include "n.h"\n#define TEXT_OF(x) #x\n#define TEXT(x) '
    "TEXT_OF(x)\n__global__ void f(int* p) { *p = sizeof(TEXT(assert(N))); }",
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


@pytest.mark.parametrize("source", ALIKE.values(), ids=ALIKE)
def test_a_kernel_hits_under_any_name_where_none_is_shown(source: str, project: Path) -> None:
    options = ARCH.replace(include_paths=["include"])
    with kcache.KernelCache(project / "cache") as cache:
        first = cache.get_or_compile(source, options=options, source_name="k.cu")
        for name in ("kernel.cu", "elsewhere/k.cu"):
            found = cache.get_or_compile(source, options=options, source_name=name)
            assert (found.cached, outputs(found)) == (True, outputs(first)), name
    with kcache.KernelCache(disable=True) as none:
        clean = none.get_or_compile(source, options=options, source_name="kernel.cu")
    assert outputs(clean) == outputs(first)


@pytest.mark.parametrize("source", NAMED.values(), ids=NAMED)
def test_a_kernel_that_shows_its_name_is_another_under_another_name(
    source: str, project: Path
) -> None:
    options = ARCH.replace(include_paths=["include"])
    with kcache.KernelCache(project / "cache") as cache:
        cache.get_or_compile(source, options=options, source_name="k.cu")
        told = cache.why(source, options=options, source_name="kernel.cu")
        # Only a proof could tell that the name is not in what the compiler made of a text.
        assert {cause.kind for cause in told.causes} <= {"source_name", "directory"}, told
        other = cache.get_or_compile(source, options=options, source_name="kernel.cu")
        assert not other.cached
        for name in ("k.cu", "kernel.cu"):
            assert cache.why(source, options=options, source_name=name).hit
            assert cache.get_or_compile(source, options=options, source_name=name).cached
    with kcache.KernelCache(disable=True) as none:
        clean = none.get_or_compile(source, options=options, source_name="kernel.cu")
    assert outputs(clean) == outputs(other)


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
        # With that name, the compiler takes the included file for the source itself.
        assert not cache.why(source, options=ARCH, source_name="k.cu").hit
        with pytest.raises(kcache.CompileError, match="already been defined"):
            cache.get_or_compile(source, options=ARCH, source_name="k.cu")


# -- a file as the source ------------------------------------------------------------------------


def test_a_path_is_its_text_and_headers_in_quotes_are_beside_it(project: Path) -> None:
    (project / "src").mkdir()
    (project / "src" / "k.cu").write_text(ALIKE["header"])
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
        path.write_text(ALIKE["header"].replace("N;", "N + 1;"))
        assert not cache.get_or_compile(path, options=ARCH).cached
        (project / "src" / "n.h").write_text("#define N 5\n")
        assert not cache.get_or_compile(path, options=ARCH).cached


@pytest.mark.parametrize(
    "name",
    ["../src/k.cu", "./sub/k.cu", "sub//k.cu", "sub/../k.cu", "none/k.cu", "x" * 300 + ".cu"],
)
def test_a_source_without_headers_is_cached_however_its_name_is_written(
    name: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("src", "work/sub"):
        (project / folder).mkdir(parents=True)
        (project / folder / "k.cu").touch()
    monkeypatch.chdir(project / "work")
    with kcache.KernelCache(project / "cache") as cache:
        for cached in (False, True):
            found = cache.get_or_compile(ALIKE["plain"], options=ARCH, source_name=name)
            assert found.cached == cached


def test_a_path_that_can_not_be_read_is_said(project: Path) -> None:
    (project / "no.cu").write_bytes(b"\xff\xfe")
    with kcache.KernelCache(project / "cache") as cache:
        with pytest.raises(FileNotFoundError):
            cache.get_or_compile(Path("none.cu"), options=ARCH)
        with pytest.raises(kcache.ConfigError, match=r"no.cu is not text: byte 0 is 0xff"):
            cache.get_or_compile(Path("no.cu"), options=ARCH)
