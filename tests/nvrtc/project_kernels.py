"""Kernels as CuPy, DeepGEMM, FlashInfer, TileLang and Warp have them compiled at run time.

Each is a source of the form that the project generates, with the options that it passes (but for
`--pch`), and includes the headers that the project ships. They
are looked for where the packages are installed, and below the folders that `TEST_HEADERS` names:
each laid out as a `site-packages`, for example an unpacked wheel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

#: Include directories below a site-packages directory, and a header that has to be in each.
FOLDERS = {
    "cupy": ("cupy/_core/include", "cupy/complex.cuh"),
    "cupy libcudacxx": ("cupy/_core/include/cupy/_cccl/libcudacxx", "cuda/std/cstdint"),
    "cupy thrust": ("cupy/_core/include/cupy/_cccl/thrust", "thrust/tuple.h"),
    "deepgemm": ("deep_gemm/include", "deep_gemm/impls/sm90_bf16_gemm.cuh"),
    "flashinfer": ("flashinfer/data/include", "flashinfer/vec_dtypes.cuh"),
    "tilelang": ("tilelang/src", "tl_templates/cuda/nvrtc_std.h"),
    "tilelang cutlass": ("tilelang/3rdparty/cutlass/include", "cute/arch/mma_sm89.hpp"),
    "warp": ("warp/native", "builtin.h"),
}


class Kernel(NamedTuple):
    """A kernel to compile; `folders` are names of the folders that it needs.

    Attributes:
        headers: in memory, as NVRTC takes them.
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


def _standard(*names: str) -> dict[str, str]:
    """Return headers of the standard library, made of those of libcu++."""
    text = "#pragma once\n#include <cuda/std/{}>\nnamespace std {{ using namespace cuda::std; }}\n"
    return {name: text.format(name) for name in names}


def project_kernels() -> Iterator[tuple[str, Kernel]]:
    yield (
        "warp",
        Kernel(
            "#define WP_TILE_BLOCK_DIM 256\n#define WP_NO_CRT\n"
            '#include "builtin.h"\n#include "deterministic.h"\n'
            'extern "C" __global__ void axpy(wp::launch_bounds_t<1> dim, '
            "wp::array_t<wp::vec_t<3, wp::float32>> x, wp::array_t<wp::vec_t<3, wp::float32>> y, "
            "wp::float32 a) {\n"
            "    wp::tile_shared_storage_t tile_mem;\n"
            "    const size_t _idx = size_t(blockIdx.x) * blockDim.x + threadIdx.x;\n"
            "    if (_idx >= dim.size) return;\n"
            "    wp::tile_shared_storage_t::init();\n"
            "    auto i = wp::tid(_idx, dim);\n"
            "    auto v = wp::load(wp::address(x, i));\n"
            "    wp::array_store(y, i, wp::add(wp::mul(v, a), wp::normalize(v)));\n"
            "}\n",
            ("warp",),
            extra=(
                "--define-macro=NDEBUG",
                "--undefine-macro=WP_VERIFY_FP",
                "--define-macro=WP_ENABLE_MATHDX=0",
                "--fmad=true",
                "--device-as-default-execution-space",
                "--extra-device-vectorization",
                "--restrict",
                "--diag-suppress=177,550",
            ),
        ),
    )
    yield (
        "cupy",
        Kernel(
            "#include <cupy/complex.cuh>\n#include <cupy/carray.cuh>\n"
            "#include <cupy/atomics.cuh>\n#include <cupy/math_constants.h>\n"
            "typedef complex<float> T;\n"
            'extern "C" __global__ void multiply(const CArray<T, 1, 1, 1> a, '
            "const CArray<T, 1, 1, 1> b, CArray<T, 1, 1, 1> c, CIndexer<1, 1> ind) {\n"
            "    CUPY_FOR(i, ind.size()) {\n"
            "        ind.set(i);\n"
            "        c[ind.get()] = a[ind.get()] * exp(b[ind.get()]);\n"
            "    }\n"
            "}\n",
            ("cupy", "cupy libcudacxx", "cupy thrust", "cuda"),
            extra=("-DCUB_DISABLE_BF16_SUPPORT", "-default-device"),
        ),
    )
    yield (
        "tilelang",
        Kernel(
            "#include <tl_templates/cuda/nvrtc_std.h>\n"
            "#include <tl_templates/cuda/instruction/mma.h>\n#include <tl_templates/cuda/copy.h>\n"
            "#include <tl_templates/cuda/reduce.h>\n#include <tl_templates/cuda/ldsm.h>\n"
            "#include <tl_templates/cuda/threadblock_swizzle.h>\n"
            "#include <tl_templates/cuda/debug.h>\n"
            'extern "C" __global__ void __launch_bounds__(128, 1) main_kernel('
            "half_t* __restrict__ A, float* __restrict__ B) {\n"
            "    extern __shared__ __align__(1024) uchar shared[];\n"
            "    tl::cp_async_gs<16>(shared + threadIdx.x * 16, A + threadIdx.x * 8);\n"
            "    tl::cp_async_commit();\n    tl::cp_async_wait<0>();\n    __syncthreads();\n"
            "    const dim3 blockIdx = tl::rasterization2DRow<10>();\n"
            "    B[threadIdx.x] = (float)((half_t*)shared)[threadIdx.x] + blockIdx.x;\n"
            "}\n",
            ("tilelang", "tilelang cutlass", "cuda", "cccl"),
            extra=("-default-device",),
            arch="sm_90a",
            edits_at_once=4,
        ),
    )
    yield (
        "flashinfer",
        Kernel(
            "#include <stdlib.h>\n#include <flashinfer/math.cuh>\n"
            "#include <flashinfer/vec_dtypes.cuh>\n#include <flashinfer/permuted_smem.cuh>\n"
            "using namespace flashinfer;\n"
            'extern "C" __global__ void silu(float* out, const half* in) {\n'
            "    vec_t<float, 8> v;\n    v.cast_load(in + threadIdx.x * 8);\n"
            "    for (int i = 0; i < 8; i++)\n"
            "        v[i] = v[i] * math::ptx_rcp(1.f + math::ptx_exp2(-v[i] * math::log2e));\n"
            "    v.store(out + threadIdx.x * 8);\n"
            "}\n",
            ("flashinfer", "cuda", "cccl", "crt"),
            extra=("-default-device",),
            headers={
                **_standard("cmath", "cstdint", "type_traits", "cstddef", "limits"),
                "stdlib.h": "typedef unsigned short ushort;\n",
                "stdint.h": "#include <cuda/std/cstdint>\nusing cuda::std::uint32_t; "
                "using cuda::std::uint64_t; using cuda::std::uintptr_t;\n",
            },
            edits_at_once=4,
        ),
    )
    arguments = (
        "cute::UMMA::Major::K, cute::UMMA::Major::K, 0, 4096, 4096, 1, 64, 64, 64, 128, 128, 128, "
        "4, 128, 128, 1, false, 132, GemmType::Normal, false, cutlass::bfloat16_t"
    )
    yield (
        "deepgemm",
        Kernel(
            "#include <cuda_device_runtime_api.h>\n"
            "#include <deep_gemm/impls/sm90_bf16_gemm.cuh>\nusing namespace deep_gemm;\n"
            "static void __instantiate_kernel() {\n"
            f"    auto ptr = reinterpret_cast<void*>(&sm90_bf16_gemm_impl<{arguments}>);\n"
            "};\n",
            ("deepgemm", "tilelang cutlass", "cuda", "cccl", "crt"),
            extra=(
                "-default-device",
                "--device-int128",
                "--diag-suppress=39,161,174,177,186,940",
            ),
            headers=_standard("utility", "type_traits", "cstdint", "limits", "cstddef", "tuple"),
            arch="sm_90a",
            edits_at_once=4,
            std=20,
        ),
    )
