"""Random trees, releases, edits and requests: the cache never disagrees with the compiler.

The seeds are fixed, so that a failure is repeated by `python -m nvrtc.machine MODE SEED ...`, or by
`python -m nvrtc.evidence_machine SEED STEPS FOLDER`.
"""

from __future__ import annotations

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
SHORT, LONG, PIECES = 25, 5000, 5


def run(machine: str, *arguments: object) -> dict[str, int]:
    """Return what a machine counted; it ends with the steps to a failure if there was one."""
    done = subprocess.run(
        [sys.executable, "-m", f"nvrtc.{machine}", *map(str, arguments)],
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
    counts = run("machine", mode, "small", 1, steps, tmp_path)
    assert counts["steps"] == steps
    if mode == "together":
        assert counts["together"] > 10
        return
    assert counts.get("moved", 0) == counts.get("moved and hit", 0)
    # Otherwise little was tried: a seed whose trees do not compile, or never come back.
    assert counts["hits"] > 4
    assert counts["seen before"] > 2


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
def test_never_stale_at_length(mode: str, tmp_path: Path) -> None:
    for seed in range(LONG_SEEDS):
        run("machine", mode, seed, 3, 40, tmp_path)


def evidence(seed: str, steps: int, folder: Path) -> None:
    """No stamp stands beside another's digest, and no kernel is stale."""
    counts = run("evidence_machine", seed, steps, folder / "tree")
    assert counts["steps"] == steps
    # Otherwise little was tried.
    assert counts["stamps"] > steps
    assert counts["hits"] > steps / 10


def test_evidence(tmp_path: Path) -> None:
    evidence("tiny", SHORT, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("piece", range(PIECES))
def test_evidence_at_length(tmp_path: Path, piece: int) -> None:
    evidence(str(piece), LONG // PIECES, tmp_path)
