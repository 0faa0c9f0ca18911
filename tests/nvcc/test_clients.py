"""Programs that start nvcc under `kcache run`: a second run in a new directory only has hits."""

import os
import sys
from pathlib import Path

import pytest
from dropin.conftest import CLIENTS, needs
from nvcc.conftest import Service

pytestmark = pytest.mark.slow


def run(service: Service, *command: object) -> tuple[str, str]:
    """Run a program to success; return its output and the counts of the daemon."""
    home = str(service.nvcc.parent.parent)
    variables = {
        "PATH": f"{os.path.dirname(sys.executable)}:{service.environment['PATH']}",
        **dict.fromkeys(("CUDA_HOME", "CUDA_PATH"), home),
        "NVCC": str(service.nvcc),
        "TVM_FFI_CUDA_ARCH_LIST": "9.0",
    }
    done = service.kcache("run", "--stats", "--", *command, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_tvm_ffi(service: Service, tmp_path: Path) -> None:
    needs("tvm_ffi")
    for name, counts in (("first", "hits 0; misses 1;"), ("second", "hits 1; misses 0;")):
        output, errors = run(service, sys.executable, CLIENTS / "tvm_inline.py", tmp_path / name)
        assert output.endswith("2\n")
        assert counts in errors
    objects = [(tmp_path / name / "cuda_0.o").read_bytes() for name in ("first", "second")]
    assert objects[0] == objects[1]


def test_cupy(service: Service) -> None:
    needs("cupy")
    first, counts = run(service, sys.executable, CLIENTS / "cupy_nvcc.py")
    assert "hits 0; misses 2;" in counts
    again, counts = run(service, sys.executable, CLIENTS / "cupy_nvcc.py")
    assert again == first
    assert "hits 2; misses 0;" in counts
