"""ctypes, as torch does it: `CDLL("libnvrtc.so.13")`. Arguments: include directory, name or path."""

import ctypes as c
import os
import sys

sys.path.append(os.path.dirname(__file__))  # also where PYTHONSAFEPATH is set
import raw

SOURCE = b'#include "scale.h"\nextern "C" __global__ void scale(float* a) { *a *= SCALE; }\n'
options = (b"-arch=sm_90", b"-I" + sys.argv[1].encode())
print(raw.outcome(c.CDLL(sys.argv[2]), SOURCE, options, name=b"scale.cu"))
