"""ctypes: loads NVRTC by `CDLL`, as torch does, and compiles with several sets of options.

Arguments: the include directory, the name or the path of NVRTC, and the options of each compile, with
`/` between two compiles.
"""

import ctypes as c
import os
import sys

sys.path.append(os.path.dirname(__file__))  # needed if PYTHONSAFEPATH is set
import raw

SOURCE = b'#include "scale.h"\nextern "C" __global__ void scale(float* a) { *a *= SCALE; }'
folder, path, *options = sys.argv[1:]
nvrtc = c.CDLL(path)
for each in "|".join(options).split("|/|"):
    texts = [*filter(None, each.split("|")), "-arch=sm_90", "-I" + folder]
    given = list(map(str.encode, texts))
    print(raw.outcome(nvrtc, SOURCE, given, name=b"scale.cu", outputs=("PTX", "CUBIN")))
