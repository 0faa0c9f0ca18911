"""cuda.core: the same by `Program.compile`."""

import hashlib
import sys

from cuda.core import Program, ProgramOptions

SOURCE = """#include "scale.h"
template <class T> __global__ void scale(T* a) { a[threadIdx.x] *= SCALE; }
"""
options = ProgramOptions(arch="sm_90", include_path=[sys.argv[1]])
code = Program(SOURCE, "c++", options).compile("cubin", name_expressions=["scale<float>"])
print(len(code.code), hashlib.sha256(code.code).hexdigest(), sorted(code.symbol_mapping.items()))
