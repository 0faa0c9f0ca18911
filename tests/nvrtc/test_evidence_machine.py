"""The machine of evidence: no stamp beside another's digest, and no stale kernel.

A failure is repeated by `python -m nvrtc.evidence_machine SEED STEPS FOLDER`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("nvrtc")

SHORT, LONG, PIECES = 25, 5000, 5


def run(seed: str, steps: int, folder: Path) -> None:
    arguments = map(str, (seed, steps, folder))
    done = subprocess.run(
        [sys.executable, "-m", "nvrtc.evidence_machine", *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["steps"] == steps
    # Otherwise little was tried.
    assert counts["stamps"] > steps
    assert counts["hits"] > steps / 10


def test_evidence(tmp_path: Path) -> None:
    run("tiny", SHORT, tmp_path / "tree")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("piece", range(PIECES))
def test_evidence_at_length(tmp_path: Path, piece: int) -> None:
    run(str(piece), LONG // PIECES, tmp_path / "tree")
