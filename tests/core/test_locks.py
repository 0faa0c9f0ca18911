"""Locks: exclude files, threads and processes, and are released with the process that held them."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.places import stopped

from kcache.util import locks as locks_module
from kcache.util.locks import is_locked, lock
from kcache.util.open_file import OwnFile, open_own

LONG = 60.0


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "locks")


def opened(path: str) -> OwnFile:
    return open_own(path, os.O_RDWR | os.O_CREAT)


def is_free(path: str, start: int, length: int = 1) -> bool:
    """Tell whether another process could lock a range, without and with trying."""
    with opened(path) as other:
        free = not is_locked(other, start, length)
        try:
            lock(other, start, length)
        except TimeoutError:
            assert not free
            return False
    assert free
    return True


# -- between processes -----------------------------------------------------------------------------


def test_only_the_range_is_locked_until_the_file_is_closed(path: str) -> None:
    with opened(path) as file:
        assert lock(file, 32, 32)
        assert not is_free(path, 63)
        assert is_free(path, 0, 32)
        assert is_free(path, 64)
        Path(path).read_bytes()  # closing another descriptor of the file releases nothing
        assert not is_free(path, 32)
    assert is_free(path, 32, 32)


def test_the_kernel_releases_what_a_killed_process_held(path: str) -> None:
    def work(stop: Callable[[], None]) -> None:
        file = opened(path)
        assert lock(file, 0, 32)
        stop()

    with stopped(work, signal.SIGKILL):
        assert not is_free(path, 0)
    assert is_free(path, 0)


def test_a_child_that_lives_on_holds_no_lock_of_its_parent(path: str) -> None:
    file = opened(path)
    assert lock(file, 0)
    with stopped(lambda stop: stop(), signal.SIGKILL):
        assert not is_free(path, 0)
        file.close()
        assert is_free(path, 0)


@pytest.mark.parametrize("code", sorted(locks_module._UNSUPPORTED))
def test_no_locks(code: int, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> bool:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(locks_module, "_range_lock", refuse)
    with opened(path) as file:
        assert lock(file, 0, timeout=LONG) is False
