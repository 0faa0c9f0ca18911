"""CuPy: runs kernels of every kind that CuPy makes, and prints a digest of each result.

Argument: the folder of `scale.h`.
"""

import hashlib
import sys

import cupy as cp


def say(name, array):
    print(name, hashlib.sha256(cp.asnumpy(array).tobytes()).hexdigest()[:12])


x, y = cp.arange(1000, dtype="f4"), cp.ones(1000, "f4")
scaled = cp.RawKernel(
    r"""
#include "scale.h"
extern "C" __global__ void scaled(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = SCALE * x[i];
}""",
    "scaled",
    options=(f"-I{sys.argv[1]}",),
)
scaled((4,), (256,), (x, y, 1000))
say("a header", y)

module = cp.RawModule(
    code=r"""
template <typename T> __global__ void axpy(T a, const T* x, T* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
""",
    options=("-std=c++17",),
    name_expressions=("axpy<float>", "axpy<double>"),
)
module.get_function("axpy<float>")((4,), (256,), (cp.float32(2), x, y, 1000))
say("a template", y)

squared = cp.ElementwiseKernel("float32 x, float32 y", "float32 z", "z = (x - y) * (x - y)", "sq")
say("element-wise", squared(x, y))
length = cp.ReductionKernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0", "l2length")
say("a reduction", length(x[:100]))
say("fused", cp.fuse()(lambda a, b: cp.sin(a) * b + a)(x, y))
try:
    cp.RawKernel('extern "C" __global__ void bad() { nothing; }', "bad")((1,), (1,), ())
except cp.cuda.compiler.CompileException as error:
    print("refused", '"nothing" is undefined' in str(error))
