"""ctypes, as torch does it: `CDLL`; compiles what includes `scale.h` with several sets of options.

Arguments: include directory, name or path of NVRTC, and the options of each compile, with `/` between them.
"""

import ctypes as c
import os
import sys

sys.path.append(os.path.dirname(__file__))  # also where PYTHONSAFEPATH is set
import raw

SOURCE = b'#include "scale.h"\nextern "C" __global__ void scale(float* a) { *a *= SCALE; }'
folder, path, *options = sys.argv[1:]
nvrtc = c.CDLL(path)
for each in "|".join(options).split("|/|"):
    texts = [*filter(None, each.split("|")), "-arch=sm_90", "-I" + folder]
    given = list(map(str.encode, texts))
    print(raw.outcome(nvrtc, SOURCE, given, name=b"scale.cu", outputs=("PTX", "CUBIN")))
