"""tvm-ffi: builds an extension from a CUDA source with ninja and nvcc. Argument: build folder."""

import sys

import tvm_ffi
from tvm_ffi import cpp

SOURCE = """
__global__ void twice_kernel(float* x, int64_t n) {
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) x[i] *= 2;
}
void twice(tvm::ffi::TensorView x) {
  twice_kernel<<<1, 32>>>(static_cast<float*>(x.data_ptr()), x.size(0));
}
int two() { return 2; }
"""
path = cpp.build_inline(
    "twice", cuda_sources=SOURCE, functions=["twice", "two"], build_directory=sys.argv[1]
)
print(tvm_ffi.load_module(path).two())
