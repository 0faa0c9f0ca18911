"""Real kernels: sources that include what CUDA, CCCL, CUTLASS and others install."""

import os
import re
import site
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypedDict

#: Include directories below a site-packages directory, and a header that has to be in each.
_FOLDERS = {
    "cccl": ("nvidia/cu13/include/cccl", "cub/cub.cuh"),
    "root": ("nvidia/cu13/include", "cccl/cuda/std/cstdint"),
    "cuda": ("nvidia/cu13/include", "cuda_fp16.h"),
    "crt": ("nvidia/cu13/include", "crt/mma.h"),
    "cutlass": ("cutlass_library/source/include", "cutlass/cutlass.h"),
    "groups": ("nvidia/cu13/include", "cooperative_groups.h"),
}
#: Names of what has internal linkage: a number of the compile, the process id, and what follows.
INTERNAL = re.compile(rb"_kernel_cu_([0-9a-f]{8})_(\d+)")
_BENCH = Path(__file__).parents[2] / "bench/kernels"


class Kernel(NamedTuple):
    """A kernel to compile; `folders` are names of the folders that it needs.

    Attributes:
        edits_at_once: of the files that it reads, between two compiles: one that takes seconds to
            compile is compiled for four edits at once.
    """

    source: str
    folders: tuple[str, ...]
    names: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    headers: Mapping[str, str] = MappingProxyType({})
    arch: str = "sm_90"
    std: int = 17
    edits_at_once: int = 1


def flags_of(kernel: Kernel) -> tuple[str, ...] | None:
    """Return the flags to compile it with, or None where its headers are not installed."""
    found = [folder_of(name) for name in kernel.folders]
    if None in found:
        return None
    paths = dict.fromkeys(f"--include-path={folder}" for folder in found)
    return (f"--gpu-architecture={kernel.arch}", f"--std=c++{kernel.std}", *paths, *kernel.extra)


def folder_of(name: str) -> Path | None:
    path, probe = _FOLDERS[name]
    for entry in dict.fromkeys((*sys.path, *site.getsitepackages())):
        if Path(entry, path, probe).is_file():
            return Path(entry, path)
    return None


class Asked(TypedDict):
    """Keywords that all who compile take."""

    names: tuple[str, ...]
    headers: Mapping[str, str]


def same_names(ptx: bytes) -> bytes:
    """Return PTX in which the names that differ from compile to compile are alike."""
    found = set(INTERNAL.findall(ptx))
    for each in {number for number, _ in found}:
        digits = os.path.commonprefix([after for n, after in found if n == each])  # noqa: RUF071
        ptx = ptx.replace(each + b"_" + digits, b"ID")
    # The lengths of such names are written before them.
    return re.sub(rb"\d+(?=_INTERNAL_|_GLOBAL__N_)", b"", ptx)


def _bench(name: str) -> str:
    return (_BENCH / f"{name}.cu").read_text()


def _made() -> Iterator[tuple[str, Kernel]]:
    yield "cub reduce", Kernel(_bench("cub_reduce"), ("cccl",), ("block_sum<float, 256, 4>",))
    yield (
        "cutlass gemm",
        Kernel(
            _bench("cutlass_gemm"),
            ("cutlass", "cccl", "root", "cuda", "crt"),
            ("gemm<128, 128, 32, 64, 64, 3>",),
            ("--device-as-default-execution-space",),
        ),
    )
    yield (
        "std",
        Kernel(
            "#include <cuda/std/array>\n#include <cuda/std/tuple>\n#include <cuda/std/complex>\n"
            "#include <cuda/std/span>\n"
            'extern "C" __global__ void k(float* o) { cuda::std::complex<float> c(o[0], o[1]); '
            "auto t = cuda::std::make_tuple(1, 2.f); o[2] = (c * c).real() + cuda::std::get<1>(t); }\n",
            ("cccl",),
        ),
    )
    yield (
        "cooperative groups",
        Kernel(
            "#include <cooperative_groups.h>\n#include <cooperative_groups/reduce.h>\n"
            "namespace cg = cooperative_groups;\n"
            'extern "C" __global__ void k(int* o) { auto b = cg::this_thread_block(); '
            "auto w = cg::tiled_partition<32>(b); o[0] = cg::reduce(w, o[1], cg::plus<int>()); }\n",
            ("groups", "cccl", "cuda", "crt"),
        ),
    )
    yield (
        "cute",
        Kernel(
            "#include <cute/tensor.hpp>\nusing namespace cute;\n"
            'extern "C" __global__ void k(float* p) { '
            "auto t = make_tensor(make_gmem_ptr(p), make_shape(Int<8>{}, Int<4>{})); "
            "t(threadIdx.x, 1) = t(1, 2); }\n",
            ("cutlass", "cccl", "root", "cuda", "crt"),
            (),
            ("--device-as-default-execution-space",),
        ),
    )


#: Those that take more than a second.
_LARGE = ("cub reduce", "cutlass gemm", "cute")
KERNELS = {
    name: kernel._replace(edits_at_once=4) if name in _LARGE else kernel for name, kernel in _made()
}
