"""Locks: exclude files, threads and processes, and go with whoever held them. So do turns."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.places import stopped
from remote.fakes import until

from kcache.util import locks as locks_module
from kcache.util.locks import Patience, Turn, Turns, is_locked, lock, unlock
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


def test_waits_in_vain_do_not_add_up(path: str) -> None:
    """Three hundred compiles beside a process that was stopped wait once."""
    patience = Patience(0.01)
    with opened(path) as holder, opened(path) as waiter:
        assert lock(holder, 0)
        with pytest.raises(TimeoutError):
            patience.lock(waiter, 0)
        patience.seconds = 3600
        for _ in range(300):
            with pytest.raises(TimeoutError):
                patience.lock(waiter, 0)
        assert patience.lock(waiter, 1)
        unlock(holder, 0)
        assert patience.lock(waiter, 0)  # free again, so that no wait is needed


# -- between threads -------------------------------------------------------------------------------


def test_a_turn_that_is_lost_is_over() -> None:
    """As one of a frame that an exception ended at a point where nothing could end the turn."""
    turns = Turns()
    lost = turns.turn()
    lost.__enter__()
    waiting = threading.Thread(target=lambda: turns.turn().__enter__())
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    del lost
    waiting.join(LONG)
    assert not waiting.is_alive()


class Counted(Turns):
    """Turns that count how often a thread looks whether its turn has come."""

    looks = 0

    def _begins(self, turn: Turn) -> bool:
        self.looks += 1
        return super()._begins(turn)


def test_threads_that_wait_do_not_look_again_and_again() -> None:
    """Eight hundred took a whole core."""
    turns, count = Counted(), 8

    def wait() -> None:
        with turns.turn():
            pass

    threads = [threading.Thread(target=wait) for _ in range(count)]
    with turns.turn():
        for number, thread in enumerate(threads, 1):
            thread.start()
            until(lambda number=number: turns.looks == 1 + 2 * number)
        threads[0].join(0.3)
        assert turns.looks == 1 + 2 * count
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()


def test_a_child_that_lives_on_holds_no_lock_of_its_parent(path: str) -> None:
    file = opened(path)
    assert lock(file, 0)
    with stopped(lambda stop: stop(), signal.SIGKILL):
        assert not is_free(path, 0)
        file.close()
        assert is_free(path, 0)


@pytest.mark.parametrize("code", sorted(locks_module._UNSUPPORTED))
def test_a_file_system_without_locks_is_told(
    code: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> bool:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(locks_module, "_range_lock", refuse)
    with opened(path) as file:
        assert lock(file, 0, timeout=LONG) is False
