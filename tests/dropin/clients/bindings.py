"""cuda.bindings: compiles a source that includes `scale.h`, and prints digests of the outputs.

Argument: the include directory.
"""

import hashlib
import sys

from cuda.bindings import nvrtc

SOURCE = b"""#include "scale.h"
template <class T> __global__ void scale(T* a) { a[threadIdx.x] *= SCALE; }
"""


def checked(error, *rest):
    assert int(error) == 0, error
    return rest[0] if len(rest) == 1 else rest


program = checked(*nvrtc.nvrtcCreateProgram(SOURCE, b"scale.cu", 0, [], []))
checked(*nvrtc.nvrtcAddNameExpression(program, b"scale<float>"))
options = [b"-arch=sm_90", b"-I" + sys.argv[1].encode()]
checked(*nvrtc.nvrtcCompileProgram(program, len(options), options))
print(checked(*nvrtc.nvrtcGetLoweredName(program, b"scale<float>")).decode())
for what in ("PTX", "CUBIN", "ProgramLog"):
    buffer = bytearray(checked(*getattr(nvrtc, f"nvrtcGet{what}Size")(program)))
    checked(*getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    print(what, len(buffer), hashlib.sha256(buffer).hexdigest())
