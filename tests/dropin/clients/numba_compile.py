"""numba-cuda: compiles a source to LTOIR with numba-cuda's own code, which needs no driver."""

import hashlib
import os
import sys

os.environ["NUMBA_CUDA_NVRTC_EXTRA_SEARCH_PATHS"] = sys.argv[1]

from numba.cuda.cudadrv import nvrtc

SOURCE = """#include "scale.h"
extern "C" __device__ float scale(float a) { return a * SCALE; }
"""
code, log = nvrtc.compile(SOURCE, "scale.cu", (9, 0), ltoir=True)
print(len(code.code), hashlib.sha256(code.code).hexdigest(), log)
