"""The README's program compiles once, and hits in the next process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from docs.pages import ROOT, blocks


@pytest.mark.usefixtures("nvrtc")
def test_the_code_compiles_once_and_hits_in_the_next_process() -> None:
    code = next(block.text for block in blocks(ROOT / "README.md") if block.language == "python")
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [run.stdout.splitlines()[0].rsplit(maxsplit=1)[-1] for run in runs] == ["False", "True"]
