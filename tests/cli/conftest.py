"""Fixtures: functions that run commands in a new process or in this one, and their directories."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from cli.helpers import use

from kcache.util import log

pytest.importorskip("click", reason="the extra cli is not installed")
pytest.importorskip("rich", reason="the extra cli is not installed")

Run = Callable[..., subprocess.CompletedProcess[bytes]]


class Said(NamedTuple):
    """The exit code and the output of a command that ran in this process."""

    code: int
    out: str
    err: str

    def clean(self) -> str:
        """Assert that the command succeeded without a message, and return its output."""
        assert (self.code, self.err) == (0, "")
        return self.out


AXPY = """template <typename T> __global__ void axpy(T a, const T* x, T* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}
"""


@pytest.fixture
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory of every command."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("KCACHE_DIR", str(directory))
    return directory


@pytest.fixture
def work(tree: Path, cache_directory: Path) -> Path:
    """The working directory. It contains the source `axpy.cu`."""
    (tree / "axpy.cu").write_text(AXPY)
    return tree


@pytest.fixture
def run(cache_directory: Path) -> Run:
    """Run `kcache ARGUMENT...` in a new process, by default with an empty standard input."""

    def run(
        *arguments: str | Path, stdin: bytes = b"", **settings: str
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "kcache", *map(str, arguments)],
            input=stdin,
            capture_output=True,
            env={**os.environ, **settings},
            timeout=240,
            check=False,
        )

    return run


@pytest.fixture
def here(cache_directory: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Said]]:
    """Run `kcache ARGUMENT...` in this process. It repeats its warnings, as a new process does."""
    from kcache.cli.app import app

    def here(*arguments: str | Path, **settings: str) -> Said:
        capfd.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(log, "_logged", set())
            for name, value in settings.items():
                patch.setenv(name, value)
            code = app.run(list(map(str, arguments)))
        return Said(code, *capfd.readouterr())

    logger = logging.getLogger("kcache")
    level = logger.level
    yield here
    logger.setLevel(level)
    for handler in [h for h in logger.handlers if h.get_name() == "kcache"]:
        logger.removeHandler(handler)


@pytest.fixture(params=("file", "zstd+lmdb"))
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend of every command: one of two that share no code."""
    return use(request.param, monkeypatch)
