"""Fixtures of the tests of the NVRTC frontend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from nvrtc.reference import working_directory


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    """A project folder, which is the working directory."""
    folder = tmp_path / "tree"
    folder.mkdir()
    with working_directory(folder):
        yield folder
