"""Random trees, releases, edits and requests: the cache never disagrees with the compiler.

The seeds are fixed, so that a failure is repeated by `python -m nvrtc.machine MODE SEED ...`.
"""

import json
from pathlib import Path

import pytest
from core.helpers import output_of
from nvrtc.machine import MODES

pytestmark = pytest.mark.usefixtures("nvrtc")

STEPS = 18
LONG_SEEDS = 75
PROGRAM = "import sys; from nvrtc.machine import main; main(*sys.argv[1:])"


def run(*arguments: object) -> dict[str, int]:
    """Return the counts of the machine. A failure is shown with the steps that led to it."""
    return dict(json.loads(output_of(PROGRAM, *arguments)))


@pytest.mark.parametrize("mode", MODES)
def test_never_stale(mode: str, tmp_path: Path) -> None:
    steps = 3 if mode == "together" else STEPS  # each step makes seven compiles or more
    counts = run(mode, "small/0", steps, tmp_path)
    assert counts["steps"] == steps
    if mode == "together":
        assert counts["together"] > 10
        return
    assert counts.get("moved", 0) == counts.get("moved and hit", 0)
    # Otherwise little was tested, because too few trees compiled or came back.
    assert counts["hits"] > 4
    assert counts["seen before"] > 2
    assert mode != "trust" or counts["stamps"] > steps


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
def test_never_stale_at_length(mode: str, tmp_path: Path) -> None:
    for seed in range(LONG_SEEDS):
        run(mode, seed, 40, tmp_path / str(seed))
