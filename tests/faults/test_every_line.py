"""LMDB and zstd: kills and interrupts at every line; nothing is lost but what was under way.

The file backend's lines are in `tests/core/test_crash.py`.
"""

from __future__ import annotations

import linecache
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType

import pytest
from core.helpers import fork, key, wait
from core.test_crash import At
from faults.places import disk_usage, held_locks, leftovers, truth

from kcache.backend import Backend, open_backend
from kcache_backends._lmdb_environment import SMALL_FILE

CAP = 4 << 20
OLD, NEW = b"old" * 50, b"new!" * 2000
ON_DISK, ABSENT = key("on disk"), key("absent")
OTHERS = [key(number) for number in range(3)]
BULK = [key(f"bulk {number}") for number in range(40)]
ALL_LINES_DONE = 7
#: The operation that begins with a large file, and ends with a new one.
EMPTY = "empty"


class AtLine(At):
    """As `At`, but where the interpreter looks for signals only: not between two lines of a lock.

    It looks after calls and at the head of loops; `try:` and finalisers are neither.
    """

    @staticmethod
    def releases_a_lock(frame: FrameType) -> bool:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        return At.releases_a_lock(frame) or line == "try:" or frame.f_code.co_name == "__del__"


def opened(place: Path, name: str) -> Backend:
    return open_backend(name, str(place / name), max_size=CAP)


def evict_and_put(backend: Backend) -> None:
    """What the engine does at the cap."""
    with backend.batch():
        backend.usage()
        for info in backend.coldest():
            if info.key in OTHERS:
                backend.delete(info.key)
                break
        backend.put(ABSENT, NEW)


def use_and_close(backend: Backend) -> None:
    backend.use(ON_DISK)
    backend.close()


def reopen(backend: Backend) -> None:
    backend.close()
    inner = getattr(backend, "inner", backend)
    with closing(opened(Path(inner._root).parent, Path(inner._root).name)) as other:
        other.usage()


def empty(backend: Backend) -> None:
    with backend.batch():
        for name in (ON_DISK, *OTHERS):
            backend.delete(name)


OPERATIONS: dict[str, Callable[[Backend], object]] = {
    "put": lambda backend: backend.put(ABSENT, NEW),
    "replace": lambda backend: backend.put(ON_DISK, NEW),
    "delete": lambda backend: backend.delete(ON_DISK),
    "evict and put": evict_and_put,
    "use and close": use_and_close,
    "coldest": lambda backend: list(backend.coldest()),
    "reopen": reopen,
    "empty": empty,
}
#: Of operations with many lines, and of zstd, which has few lines of its own, only every n-th line
#: is tried.
STRIDES = {"evict and put": 3, "empty": 4, "reopen": 2, "replace": 2}
#: The values that may be under each key afterwards.
OUTCOMES: dict[str, dict[str, tuple[bytes | None, ...]]] = {
    "put": {ABSENT: (None, NEW)},
    "replace": {ON_DISK: (OLD, NEW)},
    "delete": {ON_DISK: (OLD, None)},
    "evict and put": {ABSENT: (None, NEW), **dict.fromkeys(OTHERS, (OLD, None))},
    "empty": dict.fromkeys((ON_DISK, *OTHERS), (OLD, None)),
}


def prepare(place: Path, name: str, operation: str) -> None:
    with closing(opened(place, name)) as backend:
        for other in (*OTHERS, ON_DISK):
            backend.put(other, OLD)
        if operation == EMPTY:
            for bulk in BULK:
                backend.put(bulk, os.urandom(40_000))
            with backend.batch():
                for bulk in BULK:
                    backend.delete(bulk)


def use_after_crash(place: Path, name: str, operation: str) -> None:
    """Asserts what must hold for whoever uses the place next, without waiting for anything."""
    with closing(opened(place, name)) as backend:
        infos = list(backend.scan())
        assert backend.usage() == (sum(info.size for info in infos), len(infos))
        outcomes = OUTCOMES.get(operation, {})
        for known in (ON_DISK, *OTHERS):
            assert backend.get(known) in outcomes.get(known, (OLD,))
        assert backend.get(ABSENT) in outcomes.get(ABSENT, (None,))
        for known in (ABSENT, ON_DISK, *OTHERS):
            backend.put(known, b"next")
            assert backend.get(known) == b"next"
        assert list(backend.check()) == []
        assert backend.usage().entries == 5


def check_after_crash(place: Path, name: str, operation: str) -> None:
    """Asserts the same for a process that was killed, and what the medium says."""
    assert held_locks(place, name) == 0
    with closing(opened(place, name)) as backend:
        sizes = truth(place, name)
        assert backend.usage() == (sum(sizes.values()), len(sizes))
    use_after_crash(place, name, operation)


def try_every_line(
    name: str,
    operation: str,
    tmp_path: Path,
    action: Callable[[], object],
    *,
    ends_with: int,
    stride: int,
) -> None:
    """Runs the operation in a child for each of its lines, with the action before that line."""
    base = tmp_path / "base"
    base.mkdir()
    assert wait(fork(lambda: prepare(base, name, operation))) == 0
    for number in range(0, 2000 * stride, stride):
        place = tmp_path / str(number)
        shutil.copytree(base, place)

        def work(place: Path = place, number: int = number) -> None:
            backend = opened(place, name)
            try:
                reached = AtLine(number, action).run(lambda: OPERATIONS[operation](backend))
            except KeyboardInterrupt:
                reached = True
            if not reached:
                os._exit(ALL_LINES_DONE)
            # The interrupted process lives on with its open files.
            use_after_crash(place, name, operation)

        status = wait(fork(work))
        if status == ALL_LINES_DONE:
            assert number > stride
            if operation == EMPTY:
                assert disk_usage(place) < SMALL_FILE < disk_usage(base)
            return
        assert status == ends_with, f"line {number}"
        if status:
            check_after_crash(place, name, operation)
        sizes = truth(place, name)
        assert sizes.keys() == {ABSENT, ON_DISK, *OTHERS}
        assert leftovers(place, name) == []
        assert held_locks(place, name) == 0
        shutil.rmtree(place)
    pytest.fail("the operation never ended")


def stride_of(name: str, operation: str, *, long: bool) -> int:
    if long:
        return 1
    return round(STRIDES.get(operation, 1) * (24 if name.startswith("zstd") else 8))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", ["lmdb", "zstd+lmdb"])
def test_a_process_may_be_killed_at_any_line(
    name: str, operation: str, long: bool, tmp_path: Path
) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    stride = stride_of(name, operation, long=long)
    try_every_line(name, operation, tmp_path, die, ends_with=-signal.SIGKILL, stride=stride)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", ["lmdb", "zstd+lmdb"])
def test_an_operation_may_be_interrupted_at_any_line(
    name: str, operation: str, long: bool, tmp_path: Path
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    stride = stride_of(name, operation, long=long)
    try_every_line(name, operation, tmp_path, interrupt, ends_with=0, stride=stride)
