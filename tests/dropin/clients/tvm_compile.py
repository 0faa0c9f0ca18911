"""TVM: compiles by `compile_cuda`, which uses NVRTC by default. Argument: the include directory."""

import hashlib
import os
import sys
from pathlib import Path

import nvidia.cu13

# TVM looks for headers in a toolkit, and the wheels have them in another layout.
toolkit = Path(sys.argv[1]).with_name("toolkit")
folder = toolkit / "targets" / "x86_64-linux"
folder.mkdir(parents=True, exist_ok=True)
if not (folder / "include").exists():
    (folder / "include").symlink_to(Path(next(iter(nvidia.cu13.__path__)), "include"))
os.environ["CUDA_PATH"] = os.environ["CUDA_HOME"] = str(toolkit)
from tvm.support import nvcc  # noqa: E402  after the variables are set

source = '#include "scale.h"\nextern "C" __global__ void scale(float* a) { *a *= SCALE; }\n'
options = [f"-I{sys.argv[1]}"]
cubin = nvcc.compile_cuda(source, "cubin", "sm_90", options, compiler="nvrtc")
print(len(cubin), hashlib.sha256(cubin).hexdigest())
