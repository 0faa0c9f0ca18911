"""CuPy: compiles with nvcc in a directory with a random name, as `RawModule(backend="nvcc")` does."""

import hashlib

from cupy.cuda import compiler

SOURCE = """#include <cuda_fp16.h>
extern "C" __global__ void scale(__half* a) { *a *= __half(FACTOR); }
"""
for code_type in ("cubin", "ptx"):
    made = compiler.compile_using_nvcc(SOURCE, ("-DFACTOR=3",), "90", code_type=code_type)
    print(code_type, hashlib.sha256(made).hexdigest())
