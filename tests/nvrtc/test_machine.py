"""Random trees, releases, edits and requests: the cache never disagrees with the compiler.

The seeds are fixed, so that a failure is repeated by `python -m nvrtc.machine MODE SEED ...`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nvrtc.machine import MODES

pytestmark = pytest.mark.usefixtures("nvrtc")

STEPS = 18
LONG_SEEDS = 25


def run(*arguments: object) -> dict[str, int]:
    """Return what the machine counted; it ends with the steps to a failure if there was one."""
    done = subprocess.run(
        [sys.executable, "-m", "nvrtc.machine", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("mode", MODES)
def test_never_stale(mode: str, tmp_path: Path) -> None:
    steps = 3 if mode == "together" else STEPS  # each is seven compiles or more
    counts = run(mode, "small", 1, steps, tmp_path)
    assert counts["steps"] == steps
    if mode == "together":
        assert counts["together"] > 10
        return
    assert counts.get("moved", 0) == counts.get("moved and hit", 0)
    # Otherwise little was tried: a seed whose trees do not compile, or never come back.
    assert counts["hits"] > 4
    assert counts["seen before"] > 2
    assert mode != "trust" or counts["stamps"] > steps


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
def test_never_stale_at_length(mode: str, tmp_path: Path) -> None:
    for seed in range(LONG_SEEDS):
        run(mode, seed, 3, 40, tmp_path)
