"""A source that is alone in its directory, and uses its own name. Arguments: directories, library."""

import ctypes as c
import os
import re
import sys

SOURCE = b"""__constant__ int letters = sizeof(__FILE__);
extern "C" __global__ void k(int* out) { *out = sizeof(__FILE__); }
"""
*folders, path = sys.argv[1:]
library = c.CDLL(path)
for folder in folders:
    os.makedirs(folder, exist_ok=True)
    program, size = c.c_void_p(), c.c_size_t()
    name = os.path.join(folder, "k.cu").encode()
    assert library.nvrtcCreateProgram(c.byref(program), SOURCE, name, 0, None, None) == 0
    assert library.nvrtcCompileProgram(program, 1, (c.c_char_p * 1)(b"-arch=sm_90")) == 0
    assert library.nvrtcGetPTXSize(program, c.byref(size)) == 0
    buffer = c.create_string_buffer(size.value)
    assert library.nvrtcGetPTX(program, buffer) == 0
    print(re.findall(rb"letters = (\d+)|r1, (\d+);", buffer.value), len(name) + 1)
    assert library.nvrtcDestroyProgram(c.byref(program)) == 0
