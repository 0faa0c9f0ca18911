"""The corpus: its attention kernel compiles, and computes what it says, on a CPU too."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from harness.corpus import KERNELS, NAMES, MissingHeadersError, load
from harness.raw_nvrtc import compile_case

HERE = Path(__file__).parent
NAME = "_Z9attentionILi64ELi64ELi64ELb1EEvPK6__halfS2_S2_PS0_iif"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.usefixtures("nvrtc")
def test_attention_compiles(arch: str) -> None:
    try:
        case = load("attention")
    except MissingHeadersError as error:
        pytest.skip(str(error))
    made = compile_case(case, arch)
    assert (made.log, made.lowered_names) == ("", {case.names[0]: NAME})
    assert made.cubin is not None
    assert made.cubin.startswith(b"\x7fELF")
    # Q K^T takes 8 columns of keys x 4 steps along the head, P V 8 columns of the head x 4 steps.
    assert made.ptx.count(b"mma.sync.aligned.m16n8k16") == 64
    assert b".local" not in made.ptx  # everything is in registers


@pytest.mark.parametrize(
    "shape", ["32, 32, 32, true", "64, 64, 64, true", "48, 32, 16, false"], ids=lambda s: f"<{s}>"
)
def test_attention_on_a_cpu(shape: str, tmp_path: Path) -> None:
    """The kernel itself, compiled for the host: a thread for each of a block's threads."""
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("there is no g++")
    source = (KERNELS / "attention.cu").read_text(encoding="utf-8")
    source, count = re.subn(r"asm\(.*?\);", "tensor_core(c, a, b0, b1);", source, flags=re.DOTALL)
    assert count == 1
    (tmp_path / "attention.cpp").write_text(source, encoding="utf-8")
    program = tmp_path / "emulated"
    command = [compiler, "-std=c++20", "-O1", "-fno-strict-aliasing", "-pthread", "-w"]
    command += ["-I", str(HERE / "emulated"), "-I", str(tmp_path), f"-DSHAPE={shape}"]
    command += [str(HERE / "emulated.cpp"), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "_Float16" in done.stderr or "barrier: No such file" in done.stderr:
        pytest.skip("g++ is too old for _Float16 in C++")
    assert done.returncode == 0, done.stderr
    # Whole tiles; partial ones; queries that see no key; one of each; several tiles.
    for sizes in ("1 64 64", "2 40 70", "2 70 40", "1 1 1", "1 33 200"):
        done = subprocess.run(
            [program, *sizes.split()], capture_output=True, text=True, check=True, timeout=60
        )
        worst, largest, outside = map(float, done.stdout.split())
        assert worst <= 1e-3, f"{sizes}: {done.stdout}"  # an output is a half, of 2 at most
        assert 0.5 < largest <= 2
        assert outside == 0


def test_every_kernel_is_in_the_corpus() -> None:
    assert {path.stem for path in KERNELS.glob("*.cu")} == set(NAMES)
