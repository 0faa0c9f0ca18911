"""Real kernels: sources that include what CUDA, CCCL, CUTLASS and others install."""

from __future__ import annotations

import os
import re
import site
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypedDict

from nvrtc.project_kernels import FOLDERS, Kernel, project_kernels

#: Include directories below a site-packages directory, and a header that has to be in each.
_FOLDERS = {
    "cccl": ("nvidia/cu13/include/cccl", "cub/cub.cuh"),
    "root": ("nvidia/cu13/include", "cccl/cuda/std/cstdint"),
    "cuda": ("nvidia/cu13/include", "cuda_fp16.h"),
    "crt": ("nvidia/cu13/include", "crt/mma.h"),
    "cutlass": ("cutlass_library/source/include", "cutlass/cutlass.h"),
    "groups": ("nvidia/cu13/include", "cooperative_groups.h"),
    "curand": ("nvidia/cu13/include", "curand_kernel.h"),
    **FOLDERS,
}
#: Names of what has internal linkage: a number of the compile, the process id, and what follows.
INTERNAL = re.compile(rb"_kernel_cu_([0-9a-f]{8})_(\d+)")
_BENCH = Path(__file__).parents[2] / "bench/kernels"


def flags_of(kernel: Kernel) -> tuple[str, ...] | None:
    """Return the flags to compile it with, or None where its headers are not installed."""
    found = [folder_of(name) for name in kernel.folders]
    if None in found:
        return None
    paths = dict.fromkeys(f"--include-path={folder}" for folder in found)
    return (f"--gpu-architecture={kernel.arch}", f"--std=c++{kernel.std}", *paths, *kernel.extra)


def folder_of(name: str) -> Path | None:
    path, probe = _FOLDERS[name]
    more = filter(None, os.environ.get("TEST_HEADERS", "").split(os.pathsep))
    for entry in dict.fromkeys((*sys.path, *site.getsitepackages(), *more)):
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
    sort = "block_sort<unsigned int, int, 128, 8>"
    yield "cub radix sort", Kernel(_bench("cub_radix_sort"), ("cccl",), (sort,))
    yield (
        "attention",
        Kernel(_bench("attention"), ("cccl", "cuda", "crt"), ("attention<64, 64, 64, true>",)),
    )
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
        "cub scan",
        Kernel(
            "#include <cub/block/block_scan.cuh>\n"
            'extern "C" __global__ void k(int* d) { using S = cub::BlockScan<int, 128>; '
            "__shared__ typename S::TempStorage t; int v = d[threadIdx.x]; "
            "S(t).ExclusiveSum(v, v); d[threadIdx.x] = v; }\n",
            ("cccl",),
        ),
    )
    yield (
        "cub warp",
        Kernel(
            "#include <cub/warp/warp_reduce.cuh>\n#include <cub/block/block_load.cuh>\n"
            'extern "C" __global__ void k(int* d) { using W = cub::WarpReduce<int>; '
            "__shared__ typename W::TempStorage t; d[0] = W(t).Sum(d[threadIdx.x]); }\n",
            ("cccl",),
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
        "atomic and barrier",
        Kernel(
            "#include <cuda/atomic>\n#include <cuda/barrier>\n"
            'extern "C" __global__ void k(int* o) { '
            "cuda::atomic_ref<int, cuda::thread_scope_device> a(*o); a.fetch_add(1); }\n",
            ("cccl", "cuda", "crt"),
        ),
    )
    yield (
        "thrust",
        Kernel(
            "#include <thrust/functional.h>\n#include <thrust/tuple.h>\n"
            'extern "C" __global__ void k(float* o) { auto t = thrust::make_tuple(o[0], 2); '
            "o[2] = thrust::get<1>(t) + thrust::maximum<float>()(o[0], o[1]); }\n",
            ("cccl", "cuda", "crt"),
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
        "half",
        Kernel(
            "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n#include <cuda_fp8.h>\n"
            'extern "C" __global__ void k(__half* o, __nv_bfloat16* b) { '
            "o[0] = __hadd(o[1], o[2]); b[0] = __hmul(b[1], b[2]); }\n",
            ("cuda", "crt"),
        ),
    )
    yield (
        "tensor cores",
        Kernel(
            "#include <mma.h>\nusing namespace nvcuda;\n"
            'extern "C" __global__ void k(const __half* a, float* c) { '
            "wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major> f; "
            "wmma::load_matrix_sync(f, a, 16); c[0] = f.x[0]; }\n",
            ("cuda", "crt"),
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
    yield (
        "random numbers",
        Kernel(
            "#include <curand_kernel.h>\n"
            'extern "C" __global__ void k(float* o) { curandStatePhilox4_32_10_t s; '
            "curand_init(1, 2, 3, &s); o[0] = curand_uniform(&s); }\n",
            ("curand", "cuda", "crt", "cccl"),
        ),
    )


#: Those that take more than a second.
_LARGE = ("cub reduce", "cub radix sort", "cub scan", "cub warp", "cutlass gemm", "cute", "thrust")
KERNELS = {
    name: kernel._replace(edits_at_once=4) if name in _LARGE else kernel
    for name, kernel in (*_made(), *project_kernels())
}
