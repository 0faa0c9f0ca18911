"""Kills and interrupts at any instant: no torn value, no lock left, usage at or above the truth."""

from __future__ import annotations

import linecache
import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from core.helpers import fork, key, look, wait

from kcache.util.locks import is_locked
from kcache.util.open_file import open_own
from kcache_backends.file import FileBackend

SHARD = 5
OLD, NEW = b"old" * 50, b"new!" * 200
ON_DISK = key("on disk", shard=SHARD)
ABSENT = key("absent", shard=SHARD)
NEW_SHARD = key("new shard", shard=SHARD + 1)

OPERATIONS: dict[str, Callable[[FileBackend], object]] = {
    "put": lambda backend: backend.put(ABSENT, NEW),
    "put in a new shard": lambda backend: backend.put(NEW_SHARD, NEW),
    "replace": lambda backend: backend.put(ON_DISK, NEW),
    "delete": lambda backend: backend.delete(ON_DISK),
    "use": lambda backend: backend.use(ON_DISK),
    "coldest": lambda backend: list(backend.coldest()),
    "reopen": lambda backend: FileBackend(backend._root).usage(),
}
#: Of an operation with many lines, or with the lines of another, only every n-th line is tried.
STRIDES = {"put in a new shard": 3, "replace": 3, "delete": 2, "coldest": 127, "reopen": 3}
ALL_LINES_DONE = 7
UNLOCKING = ("_unlock", "_range_unlock", "_flock")
RELEASING = ("self._unlock(", "mutex._is_owned()", "_is_owned(mutex)", "mutex.release()")


class At:
    """Runs an action when the backend's code reaches its n-th line."""

    def __init__(self, number: int, action: Callable[[], object]) -> None:
        self.left = number
        self.action = action

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        name = frame.f_code.co_filename
        if "kcache_backends" not in name and not name.endswith("kcache/util/locks.py"):
            return None
        if event == "line" and not self.releases_a_lock(frame):
            if self.left == 0:
                self.left = -1
                self.action()
            self.left -= 1
        return self

    @staticmethod
    def releases_a_lock(frame: FrameType) -> bool:
        """Tells whether the release of a lock is next; nothing helps against interrupts of that."""
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        return frame.f_code.co_name in UNLOCKING or any(text in line for text in RELEASING)

    def run(self, work: Callable[[], object]) -> bool:
        """Runs `work`; tells whether the line was reached."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            work()
        finally:
            sys.settrace(before)
        return self.left < 0


def prepare(place: Path) -> None:
    with closing(FileBackend(place)) as backend:
        for number in range(3):
            backend.put(key(number, shard=SHARD), bytes(100))
        backend.put(ON_DISK, OLD)


def check_after_crash(place: Path, operation: str) -> None:
    """Asserts what must hold in the next process, without waiting for anything."""
    truth = look(place)
    with open_own(str(place / "counters"), os.O_RDWR) as file:
        assert not is_locked(file, 0, 32 * 256 + 1), "a lock was left"
    with closing(FileBackend(place)) as backend:
        usage = backend.usage()
        assert usage.bytes >= truth.bytes
        assert usage.entries >= len(truth.entries)
        assert backend.get(ON_DISK) in {
            "replace": (OLD, NEW),
            "delete": (OLD, None),
        }.get(operation, (OLD,))
        assert backend.get(ABSENT) in (None, NEW)
        assert backend.get(NEW_SHARD) in (None, NEW)
        for name in (ABSENT, NEW_SHARD, ON_DISK):
            backend.put(name, b"next")
            assert backend.get(name) == b"next"
        # The next writers have counted the unfinished entries again, and removed them.
        truth = look(place)
        assert truth.temporary == []
        assert backend.usage() == (truth.bytes, len(truth.entries)) == (312, 6)


def try_every_line(
    operation: str, tmp_path: Path, action: Callable[[], object], ends_with: int
) -> None:
    """Runs the operation in a child for each of its lines, with the action before that line."""
    stride = STRIDES.get(operation, 1)
    for number in range(0, 1000 * stride, stride):
        place = tmp_path / str(number)
        prepare(place)

        def work(place: Path = place, number: int = number) -> None:
            backend = FileBackend(place)
            try:
                reached = At(number, action).run(lambda: OPERATIONS[operation](backend))
            except KeyboardInterrupt:
                reached = True
            if reached:
                truth = look(place)
                assert backend.usage().bytes >= truth.bytes
                assert backend.usage().entries >= len(truth.entries)
                check_after_crash(place, operation)  # while the interrupted process lives on
                return
            os._exit(ALL_LINES_DONE)

        status = wait(fork(work))
        if status == ALL_LINES_DONE:
            assert number > 5 * stride
            return
        assert status == ends_with
        if status:
            check_after_crash(place, operation)
    pytest.fail("the operation never ended")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_process_may_be_killed_at_any_line(operation: str, tmp_path: Path) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    try_every_line(operation, tmp_path, die, ends_with=-signal.SIGKILL)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_may_be_interrupted_at_any_line(operation: str, tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    try_every_line(operation, tmp_path, interrupt, ends_with=0)


# -- many processes ------------------------------------------------------------------------------
