// gemm: D = alpha * A B + beta * C on tensor cores, half inputs, float accumulation and output,
// with the multistage (cp.async) kernel that CUTLASS has had since its version 2.
//
// Name expression  gemm<128, 128, 32, 64, 64, 3>: TileM, TileN, TileK (what a thread block
//                  computes), WarpM, WarpN (what a warp computes), Stages (of the pipeline)
// Arguments        m, n, k: int >= 1, n and k multiples of 8; alpha: float;
//                  A: half[m, k], row-major, lda: int; B: half[k, n], row-major, ldb: int;
//                  beta: float; C: float[m, n], row-major, ldc: int;
//                  D: float[m, n], row-major, ldd: int
//                  Leading dimensions count elements: lda and ldb are multiples of 8, ldc and ldd
//                  of 4. All four pointers are aligned to 16 bytes. D may be C. With beta == 0,
//                  C is not read and may be null.
// Launch           grid (ceil(m / TileM), ceil(n / TileN)),
//                  block 32 * (TileM / WarpM) * (TileN / WarpN), no dynamic shared memory
// Compile          for sm_80 or later, C++17, with --device-as-default-execution-space: CUTLASS
//                  has constexpr functions without an execution space

// Static data members of CUTLASS templates, "treated as a static definition": 14 kB of warnings.
#pragma nv_diag_suppress 20044

#include <cutlass/cutlass.h>
#include <cutlass/epilogue/thread/linear_combination.h>
#include <cutlass/gemm/kernel/default_gemm.h>
#include <cutlass/gemm/threadblock/threadblock_swizzle.h>
#include <cutlass/layout/matrix.h>
#include <cutlass/numeric_types.h>

template <int TileM, int TileN, int TileK, int WarpM, int WarpN, int Stages>
using TensorOpGemm = typename cutlass::gemm::kernel::DefaultGemm<
    cutlass::half_t, cutlass::layout::RowMajor, 8,  // A: type, layout, elements per access
    cutlass::half_t, cutlass::layout::RowMajor, 8,  // B
    float, cutlass::layout::RowMajor,               // C and D
    float,                                          // accumulator
    cutlass::arch::OpClassTensorOp,
    cutlass::arch::Sm80,
    cutlass::gemm::GemmShape<TileM, TileN, TileK>,
    cutlass::gemm::GemmShape<WarpM, WarpN, TileK>,
    cutlass::gemm::GemmShape<16, 8, 16>,            // mma.m16n8k16
    cutlass::epilogue::thread::LinearCombination<float, 4, float, float>,
    cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>,
    Stages,
    false,                                          // no split along k
    cutlass::arch::OpMultiplyAdd>::GemmKernel;

template <int TileM, int TileN, int TileK, int WarpM, int WarpN, int Stages>
__global__ void __launch_bounds__(32 * (TileM / WarpM) * (TileN / WarpN))
gemm(int m, int n, int k, float alpha,
     const cutlass::half_t* A, int lda, const cutlass::half_t* B, int ldb,
     float beta, const float* C, int ldc, float* D, int ldd)
{
    using Kernel = TensorOpGemm<TileM, TileN, TileK, WarpM, WarpN, Stages>;
    using Storage = typename Kernel::SharedStorage;
    static_assert(Kernel::kThreadCount == 32 * (TileM / WarpM) * (TileN / WarpN),
                  "the launch bound is the kernel's thread count");
    static_assert(sizeof(Storage) <= 48 * 1024, "the tiles fit in static shared memory");
    __shared__ Storage storage;

    // CUTLASS builds these parameters on the host; here every thread does, so that the arguments
    // are plain numbers and pointers, which a launch from Python can pass.
    const cutlass::gemm::GemmCoord problem(m, n, k);
    const cutlass::gemm::GemmCoord tiles((m + TileM - 1) / TileM, (n + TileN - 1) / TileN, 1);
    const typename Kernel::Params params(
        problem, tiles,
        {const_cast<cutlass::half_t*>(A), cutlass::layout::RowMajor(lda)},
        {const_cast<cutlass::half_t*>(B), cutlass::layout::RowMajor(ldb)},
        {const_cast<float*>(C), cutlass::layout::RowMajor(ldc)},
        {D, cutlass::layout::RowMajor(ldd)},
        {alpha, beta});
    Kernel()(params, storage);
}
