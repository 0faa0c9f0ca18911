"""Random calls on NVRTC's interface: the drop-in returns what the real library returns."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from dropin.conftest import Dropin

CALLS = Path(__file__).parent / "calls.py"


@pytest.mark.parametrize(
    ("mode", "count", "seed"),
    [
        ([], 2000, 11),
        (["threads"], 500, 12),
        (["forks"], 800, 13),
        pytest.param([], 6000, 14, marks=pytest.mark.slow),
    ],
)
def test_random_calls(mode: list[str], count: int, seed: int, real: Path, dropin: Dropin) -> None:
    command = (sys.executable, CALLS, real, seed, count, *mode)
    wanted, told = dropin.bare(*command), dropin.run(*command)
    assert wanted.code == told.code == 0, told.errors
    assert told.misses > 10
    ours, theirs = json.loads(told.output), json.loads(wanted.output)
    assert [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]] == []
    again = dropin.run(*command)
    assert again.output == wanted.output
    assert again.misses == 0
