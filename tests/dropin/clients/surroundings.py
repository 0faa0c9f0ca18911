"""Compiles what includes `scale.h` of the working directory. Arguments: library, options."""

import ctypes as c
import os
import sys

sys.path.append(os.path.dirname(__file__))  # also where PYTHONSAFEPATH is set
import raw

SOURCE = b"""#include "scale.h"
extern "C" __global__ void scale(float* a) { *a *= SCALE; }
"""
options = [each.encode() for each in sys.argv[2:]]
print(raw.outcome(c.CDLL(sys.argv[1]), SOURCE, options, name=None), flush=True)
