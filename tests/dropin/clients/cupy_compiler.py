"""CuPy: compiles with CuPy's own code. The device's architecture and the module are faked.

Arguments: the include directory, and, to use CuPy's disk cache, a folder for it. CuPy always compiles
an empty source first.
"""

import hashlib
import os
import sys
from types import SimpleNamespace

os.environ["CUPY_CACHE_IN_MEMORY"] = str(int(len(sys.argv) < 3))
os.environ["CUPY_CACHE_DIR"] = sys.argv[2] if len(sys.argv) > 2 else "/nonexistent"

from cupy.cuda import compiler

SOURCE = """#include "scale.h"
extern "C" __global__ void scale(float* a) { *a *= SCALE; }
"""


class Module:
    def load(self, cubin):
        self.cubin = cubin

    def _set_mapping(self, mapping):
        self.mapping = mapping


compiler.function = SimpleNamespace(Module=Module)
compiler._get_arch_for_options_for_nvrtc = lambda _arch=None: ("-arch=sm_90", "cubin")
module = compiler._compile_module_with_cache(SOURCE, (f"-I{sys.argv[1]}",), arch="90")
print(len(module.cubin), hashlib.sha256(module.cubin).hexdigest())
