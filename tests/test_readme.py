"""The Python code in README.md runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.usefixtures("nvrtc")
def test_the_code_compiles_once_and_hits_in_the_next_process() -> None:
    (code,) = BLOCKS
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [run.stdout.splitlines()[0].rsplit(maxsplit=1)[-1] for run in runs] == ["False", "True"]
