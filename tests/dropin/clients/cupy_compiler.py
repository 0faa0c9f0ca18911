"""CuPy's own way to NVRTC, without its disk cache; the device's architecture is made up."""

import hashlib
import sys

from cupy.cuda import compiler

SOURCE = """#include "scale.h"
extern "C" __global__ void scale(float* a) { *a *= SCALE; }
"""
compiler._get_arch_for_options_for_nvrtc = lambda _arch=None: ("-arch=sm_90", "cubin")
cubin, names = compiler.compile_using_nvrtc(SOURCE, (f"-I{sys.argv[1]}",), "90", "scale.cu")
print(len(cubin), hashlib.sha256(cubin).hexdigest(), names)
