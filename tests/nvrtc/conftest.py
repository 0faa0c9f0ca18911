"""Fixtures of the tests of the NVRTC frontend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from nvrtc.edits import lay
from nvrtc.reference import working_directory


@pytest.fixture(scope="session")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all tests: a worker compiles for one working directory only."""
    return tmp_path_factory.mktemp("project") / "tree"


@pytest.fixture
def tree(top: Path) -> Iterator[Path]:
    """A project folder with nothing in it, which is the working directory."""
    top.mkdir(exist_ok=True)
    lay(top, {})
    with working_directory(top):
        yield top
