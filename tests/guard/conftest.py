"""What the guard's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def has_compiler(request: pytest.FixtureRequest) -> bool:
    """Whether NVRTC is there; what needs it is skipped by the fixture `nvrtc`."""
    from kcache.errors import CompilerNotFoundError
    from kcache.nvrtc import compiler

    try:
        compiler.version()
    except CompilerNotFoundError:
        return False
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, by the path that the system calls have."""
    return tmp_path_factory.mktemp("guard").resolve()
