"""Clean or not: earlier compiles of the same compiler change nothing that kcache returns.

NVRTC keeps state between compiles. Here, one worker compiles with every option that workers
consider harmless. It then compiles probe kernels, which must equal those of new workers.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest
from core.helpers import output_of
from nvrtc.reference import ARCH, KERNEL, REL, compile_clean
from nvrtc.talk import EXAMPLES, ask, fresh_of, worker

import kcache
from kcache.nvrtc import compiler, library
from kcache.nvrtc.options import are_harmless, parse_options
from kcache.nvrtc.workers.messages import Status
from kcache.nvrtc.workers.pool import WorkerPool
from kcache.nvrtc.workers.process import WorkerProcess

pytestmark = pytest.mark.usefixtures("nvrtc")

#: Kernels whose code is likely to show traces of earlier compiles: with and without a stack,
#: divisions and calls of the math library, templates, vectors, assertions, warnings.
PROBES = {
    "rel": REL,
    "math": """
__device__ double f(double x, float y) { return sin(x) / y + sqrtf(y) * fmaf(y, y, 1.f / y); }
extern "C" __global__ void math(double* o, const float* x) {
    int unused; o[threadIdx.x] = f(o[threadIdx.x], x[threadIdx.x]);
}
""",
    "names": """
template <class T> __global__ void name(char* o, T t) {
    o[threadIdx.x] = __func__[threadIdx.x] + __PRETTY_FUNCTION__[threadIdx.x] + sizeof(t);
}
template __global__ void name<int>(char*, int);
struct P { char c; double d; };
extern "C" __global__ void packed(int* o) { *o = sizeof(P); }
""",
    "copy": """
struct alignas(16) F { float x, y, z, w; };
template <int N> __device__ void copy(F* __restrict__ o, const F* __restrict__ i) {
#pragma unroll
    for (int n = 0; n < N; n++) o[n * blockDim.x + threadIdx.x] = i[n * blockDim.x + threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(128) copies(F* o, const F* i) { copy<7>(o, i); }
extern "C" __global__ void many(F* o, const F* i) { copy<40>(o, i); }
""",
    "macros": """
#if __has_include("nothing.h") || defined(X) || defined(Y)
#error no
#endif
__device__ int called(int n);
extern "C" __global__ void macros(long* o) { o[0] = __cplusplus; o[1] = called(1); }
__device__ __noinline__ int called(int n) { return n + 7; }
#ifdef __FAST_MATH__
extern "C" __global__ void fast() {}
#endif
#ifdef __CUDACC_RDC__
extern "C" __global__ void rdc() {}
#endif
""",
}
#: The source that is compiled with each option.
USED = """
extern "C" __global__ void used(float* o) { int unused; o[0] = o[1] / sqrtf(o[2]) + o[3] * o[4]; }
"""
PLAIN = [*((name, "sm_80") for name in PROBES), ("rel", "sm_90")]


def probe(name: str, arch: str) -> tuple[str, tuple[str, ...]]:
    return PROBES[name], (f"--gpu-architecture={arch}",)


def asked(process: WorkerProcess, source: str, flags: Sequence[str]) -> tuple[object, ...]:
    """Return the outputs of a worker for `source`, and the files that the worker looked up."""
    reply = process.ask(ask(source, flags), None)
    assert reply.trace is not None
    made = fresh_of(reply)
    return made.ptx, made.cubin, made.log, sorted(reply.trace.files)


Expected: TypeAlias = dict[object, tuple[object, ...]]


@pytest.fixture(scope="module")
def expected(nvrtc: tuple[int, int]) -> Expected:
    """The outputs of new workers for the probes."""
    made: Expected = {}
    for each in PLAIN:
        with worker() as process:
            made[each] = asked(process, *probe(*each))
    return made


def _used(process: WorkerProcess, example: str) -> None:
    """Compile with the option `example`, and assert that it is considered harmless."""
    assert are_harmless(parse_options([example]))
    named = "-arch" in example or "--gpu-architecture" in example
    flags = (example,) if named else ("-arch=sm_80", example)
    process.ask(ask(USED, flags), None)


def _check(process: WorkerProcess, expected: Expected, after: str) -> None:
    """Assert that a worker compiles the probes like new workers."""
    for each in PLAIN:
        assert asked(process, *probe(*each)) == expected[each], f"{each} after {after}"


def test_harmless_options_leave_nothing_behind(expected: Expected) -> None:
    """One worker compiles with every harmless option, and then compiles probes like a new one."""
    with worker() as process:
        for example in EXAMPLES:
            _used(process, example)
        _check(process, expected, "all")


#: Sources that compile, and might change what comes after them.
SOURCES = {
    "pack": "#pragma pack(push, 1)\nstruct Q { char c; double d; };\n",
    "diagnostics": "#pragma nv_diag_suppress 177\n#pragma nv_diag_error 550\n",
    "warning": "#warning here\n",
    "macro": "#define int long\n#define __func__ no\n",
    "line": '#line 2147483647 "other.h"\n',
    "assembly": 'asm(".globl x;");\n',
    "fenv": "#pragma STDC FP_CONTRACT OFF\n",
    "pragma": "#pragma unroll 3\n#pragma nounroll\nvoid f();\n#pragma weak f\n",
    "default-device": "#pragma nv_exec_check_disable\n",
    "deep": "template<int N> struct D { enum { v = D<N-1>::v }; };\n"
    "template<> struct D<0> { enum { v = 0 }; };\nstatic_assert(D<190>::v == 0);\n",
    "stack": 'extern "C" __global__ void big(int* o, int i) { volatile int a[4000]; a[i] = i; '
    "*o = a[i + 1]; }\n",
}


def test_sources_leave_nothing_behind(expected: Expected) -> None:
    """A worker is used again after any source that compiles, whatever the source contains."""
    with worker() as process:
        compiled = 0
        for source in SOURCES.values():
            compiled += process.ask(ask(source), None).status == Status.COMPILED
        assert compiled >= 8
        _check(process, expected, "all")


HARMFUL = (
    "-G --device-debug -Ofc=max --restrict -restrict --Ofast-compile=max -Ofast-compile=min "
    "--nonsense -Xptxas --ptxas-options=-O3,-v --ptxas-options=-optf=x --pch -arch "
    "--fdevice-time-trace=x"
)


@pytest.mark.parametrize("flag", [*HARMFUL.split(), "-std=c++17 -G", ""])
def test_other_options_are_not_harmless(flag: str) -> None:
    assert not are_harmless(parse_options([flag]))
    assert not are_harmless(parse_options(["-arch=sm_80", flag]))


class Pids:
    """A pool with one worker. The process id of the worker shows whether it was replaced."""

    def __init__(self) -> None:
        self.pool = WorkerPool(1)
        self.library = library.require().path

    def compile(self, source: str, *flags: str) -> list[int]:
        self.pool.compile(self.library, ask(source, ("-arch=sm_80", *flags)))
        return self.pool.pids()


@pytest.fixture
def pids() -> Iterator[Pids]:
    made = Pids()
    yield made
    made.pool.close()


def test_a_worker_is_used_again_after_harmless_options(pids: Pids) -> None:
    first = pids.compile(REL)
    assert len(first) == 1
    assert pids.compile(REL, "-lineinfo", "--ptxas-options=-O1", "-DX=1") == first
    assert pids.compile(KERNEL, "-DV=3") == first


@pytest.mark.parametrize(
    ("source", "flags"),
    [
        (REL, ["-G"]),
        (REL, ["--nonsense"]),
        ("#error no\n", []),
    ],
)
def test_a_worker_is_not_used_again_after_others(pids: Pids, source: str, flags: list[str]) -> None:
    (first,) = pids.compile(REL)
    assert pids.compile(source, *flags) == []
    (second,) = pids.compile(REL)
    assert second != first


# -- through the cache -----------------------------------------------------------------------------

#: A program that has tainted its own NVRTC. It prints whether the taint changed the code, and
#: whether the kernel from the cache is untainted.
_TAINTED = """
import hashlib, sys
import kcache
from nvrtc.reference import _compile, ARCH, REL

source = REL
before = _compile(source, ["-arch=sm_80"], (), {}, "kernel.cu")
assert not _compile(source, ["-arch=sm_80", "-G"], (), {}, "kernel.cu").failed
after = _compile(source, ["-arch=sm_80"], (), {}, "kernel.cu")
with kcache.KernelCache(sys.argv[1]) as cache:
    kernel = cache.get_or_compile(source, (), ARCH)
    assert not kernel.cached
print(before.cubin != after.cubin, kernel.cubin == before.cubin, kernel.ptx == before.ptx)
"""


def test_a_tainted_program_does_not_taint_kernels(tmp_path: Path) -> None:
    said = output_of(_TAINTED, tmp_path / "cache").split()
    assert said[1:] == ["True", "True"]
    if compiler.hello().version >= (13, 5):  # fails once NVRTC no longer has this problem
        assert said[0] == "True"
    with kcache.KernelCache(tmp_path / "cache") as cache:
        kernel = cache.get_or_compile(REL, (), ARCH)
    assert kernel.cached
    assert kernel.cubin == compile_clean(REL, ARCH.flags()).cubin
