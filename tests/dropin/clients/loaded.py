"""ctypes, as torch does it: `CDLL("libnvrtc.so.13")`. Arguments: include directory, name or path."""

import ctypes as c
import hashlib
import sys

library = c.CDLL(sys.argv[2])
program = c.c_void_p()
source = b'#include "scale.h"\nextern "C" __global__ void scale(float* a) { *a *= SCALE; }\n'
assert library.nvrtcCreateProgram(c.byref(program), source, b"scale.cu", 0, None, None) == 0
options = (c.c_char_p * 2)(b"-arch=sm_90", b"-I" + sys.argv[1].encode())
assert library.nvrtcCompileProgram(program, 2, options) == 0
for what in ("PTX", "CUBIN"):
    size = c.c_size_t()
    assert getattr(library, f"nvrtcGet{what}Size")(program, c.byref(size)) == 0
    buffer = c.create_string_buffer(size.value)
    assert getattr(library, f"nvrtcGet{what}")(program, buffer) == 0
    print(what, size.value, hashlib.sha256(buffer.raw).hexdigest())
assert library.nvrtcDestroyProgram(c.byref(program)) == 0
