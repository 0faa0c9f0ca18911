"""Broken backends: each has one fault, which a test of the contract has to detect."""

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from backends.suites import FileSuite, MemorySuite
from hypothesis import Phase, settings

from kcache.backend import EntryInfo
from kcache.errors import BackendError
from kcache.testing import MemoryBackend
from kcache.testing.contract import BackendContract
from kcache.testing.machine import DEFAULTS
from kcache_backends.file import FileBackend


class Partial(MemoryBackend):
    def get(self, key: str) -> bytes | None:
        value = super().get(key)
        return None if value is None else value[:65_536]


class Undercounting(MemoryBackend):
    """A backend that subtracts the size of an old value twice when a put replaces this value."""

    def put(self, key: str, value: bytes) -> int:
        held = len(self.values.get(key, b""))
        stored = super().put(key, value)
        self._size -= held
        return stored


class Eager(MemoryBackend):
    def coldest(self) -> Iterator[EntryInfo]:
        return iter(list(self.scan()))


class ByTheClock(MemoryBackend):
    def __init__(self, *, clock: Callable[[], int]) -> None:
        super().__init__(clock=clock)
        self._now = clock

    def coldest(self) -> Iterator[EntryInfo]:
        return iter(sorted(self.scan(), key=lambda info: info.used_ns))


class Halves(MemoryBackend):
    """A backend that puts a value in two steps, so that a reader may get the first half alone."""

    def put(self, key: str, value: bytes) -> int:
        super().put(key, value[: len(value) // 2])
        time.sleep(0)
        return super().put(key, value)


class Swallowing(MemoryBackend):
    @contextmanager
    def batch(self) -> Generator[None]:
        with suppress(Exception):
            yield


class Stuck(MemoryBackend):
    """A backend that does not release its lock when a batch fails."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._busy = threading.RLock()

    @contextmanager
    def batch(self) -> Generator[None]:
        self._busy.acquire()
        yield
        self._busy.release()

    def put(self, key: str, value: bytes) -> int:
        with self._busy:
            return super().put(key, value)


# -- over files ------------------------------------------------------------------------------------


class Foreign(FileBackend):
    """A backend that raises the medium's own errors instead of BackendError."""

    @contextmanager
    def _translated(self, operation: str) -> Generator[None]:
        yield


class LockFile(FileBackend):
    """A backend that locks with a file. The file stays if the process that created it is killed."""

    def put(self, key: str, value: bytes) -> int:
        name = f"{self._root}/lock"
        for _ in range(1000):
            with suppress(FileExistsError):
                os.close(os.open(name, os.O_CREAT | os.O_EXCL))
                break
            time.sleep(0.001)
        else:
            raise BackendError("locked")
        try:
            time.sleep(0.002)  # long enough for some kills to hit a process that holds the lock
            return super().put(key, value)
        finally:
            os.unlink(name)


class LosingUses(FileBackend):
    """A backend that writes recorded uses only before it iterates. Closing it loses the others."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._noted: dict[str, int] = {}

    def coldest(self) -> Iterator[EntryInfo]:
        for name, used in self._noted.items():
            os.utime(self._path(name), ns=(used, used))
        self._noted = {}
        return super().coldest()

    def touch(self, key: str) -> None:
        if os.path.exists(self._path(key)):
            self._noted[key] = self._now()

    def use(self, key: str) -> bytes | None:
        self.touch(key)
        return self.get(key)


class Unasked(FileBackend):
    """A backend that records uses even if it was opened for reading only."""

    def use(self, key: str) -> bytes | None:
        with suppress(FileNotFoundError):
            os.utime(self._path(key))
        return super().use(key)


class Leaking(FileBackend):
    """A backend that leaves a file open after each put."""

    def put(self, key: str, value: bytes) -> int:
        stored = super().put(key, value)
        os.open(self._path(key), os.O_RDONLY)
        return stored


class ForkUnsafe(FileBackend):
    """A backend whose lock stays locked in a forked child if it was locked during the fork."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._mutex = threading.Lock()

    def put(self, key: str, value: bytes) -> int:
        with self._mutex:
            time.sleep(0.002)
            return super().put(key, value)


#: Each broken backend, and the test of the contract that detects it.
CAUGHT: list[tuple[Callable[..., Any], str]] = [
    (Partial, "test_it_behaves_as_its_model"),
    (Undercounting, "test_it_behaves_as_its_model"),
    (Eager, "test_a_large_cache_costs_no_more_than_a_small_one"),
    (ByTheClock, "test_it_behaves_as_its_model"),
    (Halves, "test_eight_threads_on_four_keys"),
    (Swallowing, "test_it_behaves_as_its_model"),
    (Stuck, "test_a_batch_is_of_one_thread"),
    (Foreign, "test_a_place_that_is_something_else"),
    (LockFile, "test_killed_writers_leave_a_sound_place"),
    (LosingUses, "test_it_behaves_as_its_model"),
    (Unasked, "test_reading_only_changes_nothing"),
    (Leaking, "test_opening_many_times_leaks_nothing"),
    (ForkUnsafe, "test_a_fork_beside_busy_threads"),
]


def suite_of(broken: Callable[..., Any]) -> BackendContract:
    """Return the contract suite for a broken backend."""
    base = FileSuite if issubclass(broken, FileBackend) else MemorySuite  # type: ignore[arg-type]

    class Suite(base):  # type: ignore[misc, valid-type]
        backend = broken
        machine_settings = settings(
            DEFAULTS, phases=[Phase.generate], derandomize=True, max_examples=200
        )

    return Suite()
