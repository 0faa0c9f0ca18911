"""The corpus: its attention kernel compiles, to what it should."""

from __future__ import annotations

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


def test_every_kernel_is_in_the_corpus() -> None:
    assert {path.stem for path in KERNELS.glob("*.cu")} == set(NAMES)
