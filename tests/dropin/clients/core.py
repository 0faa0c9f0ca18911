"""cuda.core: does the same as `bindings.py` with `Program.compile`.

Arguments: the include directory, and, to use cuda.core's own cache, a folder for it. That cache
accepts no include directories, so the header is in the working directory then.
"""

import hashlib
import os
import sys

from cuda.core import Program, ProgramOptions
from cuda.core.utils import FileStreamProgramCache

SOURCE = """#include "scale.h"
template <class T> __global__ void scale(T* a) { a[threadIdx.x] *= SCALE; }
template __global__ void scale<float>(float*);
"""
if len(sys.argv) > 2:
    os.chdir(sys.argv[1])
    with FileStreamProgramCache(sys.argv[2]) as cache:
        code = Program(SOURCE, "c++", ProgramOptions(arch="sm_90")).compile("cubin", cache=cache)
else:
    options = ProgramOptions(arch="sm_90", include_path=[sys.argv[1]])
    code = Program(SOURCE, "c++", options).compile("cubin", name_expressions=["scale<float>"])
print(len(code.code), hashlib.sha256(code.code).hexdigest(), sorted(code.symbol_mapping.items()))
