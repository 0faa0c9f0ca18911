"""What reads and follows pages finds what is wrong with them."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from docs.pages import blocks
from docs.reader import Reader, follow

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="the pages are for a POSIX shell"),
    pytest.mark.skipif(shutil.which("bash") is None, reason="bash is missing"),
]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("```sh\nfalse\n```", r"page\.md:1: exit status 1, not 0"),
        ("```sh\necho $UNSET\n```", "exit status 1, not 0"),
        ("<!-- test: exit 1 -->\n```sh\ntrue\n```", r"page\.md:2: exit status 0, not 1"),
        ("```python\nprint(1)\n```\n\n```text\n2\n```", r"page\.md:5: .*"),
        ("```console\n$ echo 1\n2\n```", "the page says:\n2\n\nit says:\n1\n"),
        ("```{doctest}\n>>> 1\n2\n```", "Expected:\n    2\nGot:\n    1"),
        ("```sh\necho 1\n```\n\nBut:\n\n```text\n1\n```", "nothing's output"),
        ("```\nplain\n```", "nothing runs a block of 'no language'"),
        ("```json\n{\n```", "this is no json"),
        ("```sh\n.venv/bin/pip install x\n```", "a test does not change the machine"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(text: str, told: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    with pytest.raises(AssertionError, match=told):
        read(page, tmp_path / "reader")


def read(page: Path, folder: Path) -> None:
    with closing(Reader(folder)) as reader:
        for block in blocks(page):
            follow(reader, block)
