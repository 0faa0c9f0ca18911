"""Kills at every line of an operation: nothing is lost except the change that was being made."""

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from core.helpers import fork, key, wait
from faults.places import NAMES, disk_usage, held_locks, is_lmdb, leftovers, truth
from faults.stepper import Stepper

from kcache.backend import Backend, open_backend
from kcache_backends._lmdb_environment import SMALL_FILE

CAP = 4 << 20
OLD, NEW = b"old" * 50, b"new!" * 2000
ON_DISK, ABSENT = key("on disk"), key("absent")
OTHERS = [key(number) for number in range(3)]
BULK = [key(f"bulk {number}") for number in range(40)]
FILES = (
    "/kcache_backends/",
    "/kcache/util/locks.py",
    "/kcache/util/open_file.py",
    "/kcache/util/path_safety.py",
)
#: The operation for which LMDB begins with a large file and ends with a new, small one.
EMPTY = "empty"
#: How many points of an operation are tried without `--long`.
POINTS = 4


def opened(place: Path, name: str) -> Backend:
    return open_backend(name, str(place / name), max_size=CAP)


def evict_and_put(backend: Backend) -> None:
    """Do what the engine does for a put at the cap."""
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
    """Assert that a process that uses the cache after a kill finds it in order."""
    with closing(opened(place, name)) as backend:
        infos = list(backend.scan())
        usage = backend.usage()
        assert usage.bytes >= sum(info.size for info in infos)
        assert usage.entries >= len(infos)
        assert usage.entries == len(infos) or not is_lmdb(name)
        outcomes = OUTCOMES.get(operation, {})
        for known in (ON_DISK, *OTHERS):
            assert backend.get(known) in outcomes.get(known, (OLD,))
        assert backend.get(ABSENT) in outcomes.get(ABSENT, (None,))
        for known in (ABSENT, ON_DISK, *OTHERS):
            backend.put(known, b"next")
            assert backend.get(known) == b"next"
        assert list(backend.check()) == []
        assert backend.usage().entries == 5


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_kill_at_any_line(name: str, operation: str, long: bool, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    assert wait(fork(lambda: prepare(base, name, operation))) == 0

    def step(place: Path, number: int) -> Stepper:
        shutil.copytree(base, place)
        stepper = Stepper(number, die, FILES)
        with closing(opened(place, name)) as backend:
            backend.usage()  # because the first call of a process reads more
            stepper.run(lambda: OPERATIONS[operation](backend))
        return stepper

    points = step(tmp_path / "all", -1).points
    if operation == EMPTY and is_lmdb(name):
        assert disk_usage(tmp_path / "all") < SMALL_FILE < disk_usage(base)
    wanted = points if long else POINTS
    assert points >= wanted
    for number in range(0, points, max(1, points // wanted)):
        place = tmp_path / str(number)
        pid = fork(lambda place=place, number=number: step(place, number))
        assert wait(pid) == -signal.SIGKILL, f"point {number}"
        assert held_locks(place, name) == 0
        use_after_crash(place, name, operation)
        assert truth(place, name).keys() == {ABSENT, ON_DISK, *OTHERS}
        assert leftovers(place, name) == []
        shutil.rmtree(place)
