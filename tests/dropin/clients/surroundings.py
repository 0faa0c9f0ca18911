"""Compiles what includes `scale.h` of the working directory. Arguments: library, options."""

import ctypes as c
import hashlib
import sys

SOURCE = b"""#include "scale.h"
extern "C" __global__ void scale(float* a) { *a *= SCALE; }
"""
nvrtc = c.CDLL(sys.argv[1])
program = c.c_void_p()
assert nvrtc.nvrtcCreateProgram(c.byref(program), SOURCE, None, 0, None, None) == 0
options = (c.c_char_p * 9)(*(each.encode() for each in sys.argv[2:]))
result = nvrtc.nvrtcCompileProgram(program, len(sys.argv) - 2, options)
told = [str(result)]
for what in ("PTX", "CUBIN", "ProgramLog"):
    size = c.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, c.byref(size))
    buffer = c.create_string_buffer(size.value or 1)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    told += [str(size.value), hashlib.sha256(buffer.raw).hexdigest()]
print(*told, flush=True)
