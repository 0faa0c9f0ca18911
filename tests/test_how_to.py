"""The how-to pages: their Python runs as printed, and prints what they say it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HOW_TO = Path(__file__).parents[1] / "docs" / "how-to"
#: Page -> what its blocks print, in order. Pages that other tests run are not here.
PAGES = {
    "many-at-once.md": [
        r"(\d of 8\n){8}(\d+ False\n){8}",
        r"1000 1\n",
    ],
}


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("page", PAGES)
def test_the_page_runs_as_printed(page: str, tmp_path: Path) -> None:
    text = (HOW_TO / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == len(PAGES[page])
    for block, printed in zip(blocks, PAGES[page], strict=True):
        done = subprocess.run(
            [sys.executable, "-c", block],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(printed, done.stdout), done.stdout
