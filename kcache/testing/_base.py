"""ContractBase: the methods that the author of a backend supplies, and helpers of the tests."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import sys
import threading
import tracemalloc
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest

from kcache.backend import Backend
from kcache.testing.doubles import FakeClock

#: A child or thread that takes longer than this many seconds counts as hanging. No test here takes
#: this long.
PATIENCE = 60


def fork(work: Callable[[], object]) -> BaseProcess:
    """Start a forked child that runs `work`; skip the test if this system can't fork.

    If `work` raises an exception, the child prints it to standard error and exits with 1.
    """
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    child = multiprocessing.get_context("fork").Process(target=work)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: forks with threads
        child.start()
    return child


def end_of(child: BaseProcess) -> int | None:
    """Wait until a child ends; return its exit code. Fail the test if the child hangs.

    If a signal ended the child, the exit code is the negative number of the signal.
    """
    child.join(PATIENCE)
    if child.exitcode is None:
        child.kill()
        child.join()
        pytest.fail("the child hangs")
    return child.exitcode


def run_forked(work: Callable[[], object], here: Callable[[], object] = int) -> None:
    """Run `work` in a forked child, and `here` in this process; both have to succeed."""
    child = fork(work)
    try:
        here()
    finally:
        status = end_of(child)
    assert status == 0, f"the child exited with {status}"


def kill_writers(
    work: Callable[[int, Callable[[], object]], object], count: int, random: Random
) -> None:
    """Start `count` processes that write without end; kill them after some random operations.

    Each process calls `work` with a seed and a function. `work` calls this function after every
    operation.
    """
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as reports:
        with open(writing, "wb", buffering=0) as report:
            children = [
                fork(partial(work, random.getrandbits(32), partial(report.write, b".")))
                for _ in range(count)
            ]
        try:
            for _ in range(random.randrange(1, 60)):
                assert reports.read(1), "every writer has failed"
            for _ in range(random.randrange(20_000)):
                pass  # ... so that the signal comes anywhere within an operation
        finally:
            for child in children:
                child.kill()
            ends = [end_of(child) for child in children]
    assert ends == [-signal.SIGKILL] * count, f"a writer failed: {ends}"


class StopError(Exception):
    """Raised by a test within a batch, to make the batch fail."""


#: The cap in bytes, unless a test sets another one. No test puts as much.
MAX_SIZE = 64 << 20


def key(number: object) -> str:
    """Return the key that stands for `number`."""
    return hashlib.sha256(str(number).encode()).hexdigest()


def sealed(name: str, number: int, size: int) -> bytes:
    """Return a value of `size` bytes (at least 16) for the key `name`, which `intact` recognises.

    Different numbers give different values.
    """
    stream = hashlib.sha256(f"{name} {number} {size}".encode()).digest()
    return (number.to_bytes(8, "little") + stream * (size // len(stream) + 1))[:size]


def intact(name: str, value: bytes) -> bool:
    """Return whether `value` is a whole value that `sealed` made for the key `name`."""
    return value == sealed(name, int.from_bytes(value[:8], "little"), len(value))


def as_threads(*works: Callable[[], object]) -> None:
    """Run each function in its own thread, all at the same time; each has to succeed."""
    errors: list[BaseException] = []
    together = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> None:
        try:
            together.wait(PATIENCE)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def anything(backend: Backend, random: Random, names: Sequence[str], largest: int) -> None:
    """Do a random operation on an entry whose key is one of `names`, and check the result."""
    name, choice = random.choice(names), random.randrange(12)
    if choice < 5:
        size = random.randrange(16, largest)
        backend.put(name, sealed(name, random.getrandbits(32), size))
    elif choice < 6:
        backend.delete(name)
    elif choice < 8:
        value = backend.get(name) if choice == 6 else backend.use(name)
        assert value is None or intact(name, value)
    elif choice < 9:
        backend.touch(name)
    elif choice < 10:
        with backend.batch():
            for info in islice(backend.coldest(), 1):
                backend.delete(info.key)
            backend.put(name, sealed(name, 7, 100))
    else:
        infos = list(backend.coldest() if choice == 10 else backend.scan())
        assert len({info.key for info in infos}) == len(infos)
        backend.usage()


def work_of(act: Callable[[], object]) -> tuple[int, int]:
    """Run `act` twice; return the number of its function calls and its peak of allocated bytes."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(before)
    tracemalloc.start()
    act()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return calls, peak


class ContractBase:
    """The methods and attributes that the author of a backend supplies.

    `open` and `look` are required. Each further one allows more tests.

    Attributes:
        persistent: values still exist when the place is opened again.
        shared: several handles, in any number of processes, may use the same place at the same
            time.
        exact_order: `coldest` follows the last use exactly, at least for a few hundred entries.
        heals: an open handle works again after its directory was removed.
        takes_clock: `open` passes `clock` to the backend.
        resolution: if two uses are at least this many nanoseconds apart, their order is kept.
        kills: how often a test kills writers of each kind (with batches, and without).
        refuses_strangers: a place that has files of other programs is rejected, and not changed.
        bounds_reads: values that are larger than the cap are not read into memory.
    """

    persistent: bool = True
    shared: bool = True
    exact_order: bool = True
    heals: bool = True
    takes_clock: bool = True
    resolution: int = 1_000
    kills: int = 8
    refuses_strangers: bool = True
    bounds_reads: bool = True

    # -- supplied by the author ------------------------------------------------------------------

    def open(
        self,
        place: Path,
        *,
        max_size: int = MAX_SIZE,
        read_only: bool = False,
        clock: Callable[[], int] | None = None,
    ) -> Backend:
        """Open the backend at `place`, and return it. Before the first call, nothing is at `place`.

        `max_size` is the cap in bytes. `clock` returns nanoseconds since the epoch; the default is
        the system's clock.
        """
        raise NotImplementedError

    def look(self, place: Path) -> Mapping[str, int]:
        """Return the stored size of every key at `place`, as `Backend.usage` counts it.

        This method reads the medium itself, without the backend. The tests call it while handles
        are open, and while other processes put and delete. The result may then lack changes that
        are made after the call has begun. If the place does not exist, the result is empty.
        """
        raise NotImplementedError

    def read_raw(self, place: Path, key: str) -> bytes:
        """Return the bytes that the medium holds for `key`.

        If the author supplies no such method, the tests that damage values are skipped.
        """
        pytest.skip("read_raw is not supplied")

    def write_raw(self, place: Path, key: str, image: bytes) -> None:
        """Replace the bytes that the medium holds for `key` by `image`, which may be longer."""
        pytest.skip("write_raw is not supplied")

    def leftovers(self, place: Path) -> Collection[object]:
        """Return the remains of interrupted writers at `place`: temporary files, reservations."""
        return ()

    def snapshot(self, place: Path) -> Mapping[str, object]:
        """Return everything that must not change at `place` while it is open for reading only."""
        found: dict[str, object] = {}
        for path in sorted(place.rglob("*")):
            status = path.stat()
            content = path.read_bytes() if path.is_file() else None
            found[str(path)] = (status.st_mode, status.st_mtime_ns, content)
        return found

    # -- shared by the tests ---------------------------------------------------------------------

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        """A place that does not exist yet."""
        return tmp_path / "place"

    @pytest.fixture(autouse=True)
    def _ends_cleanly(self) -> Iterator[None]:
        """Fail a test if a thread of the backend still runs afterwards."""
        before = threading.active_count()
        yield
        assert threading.active_count() <= before, "a thread of the backend still runs"

    def opened(self, place: Path, **options: Any) -> closing[Backend]:  # noqa: ANN401
        """Open the backend for a `with` block, which closes it; `options` are those of `open`."""
        return closing(self.open(place, **options))

    def needs(self, *attributes: str) -> None:
        """Skip the test if one of these attributes of the class is false."""
        for each in attributes:
            if not getattr(self, each):
                pytest.skip(f"the attribute {each} is false")

    def pass_time(self, clock: FakeClock) -> None:
        """Advance the clock so far that uses before and after this call keep their order."""
        clock.advance(2 * self.resolution / 1e9)

    def fill(self, backend: Backend, count: int, *, size: int = 100) -> list[str]:
        """Put `count` entries; return their keys, least recently used first."""
        names = [key(number) for number in range(count)]
        for number, name in enumerate(names):
            backend.put(name, sealed(name, number, size))
        return names

    def agree(
        self, backend: Backend, place: Path, expected: Mapping[str, bytes] | None = None
    ) -> None:
        """Assert that `usage` agrees with `look`.

        If `expected` is given, assert that the medium has its keys, and the backend its values.
        """
        sizes = self.look(place)
        assert backend.usage() == (sum(sizes.values()), len(sizes))
        if expected is not None:
            assert sizes.keys() == expected.keys()
            for name, value in expected.items():
                assert backend.get(name) == value

    def not_below_the_truth(self, backend: Backend, place: Path) -> None:
        """Assert that `usage` is not below the size and number of the medium's entries."""
        sizes = self.look(place)
        usage = backend.usage()
        assert usage.bytes >= sum(sizes.values())
        assert usage.entries >= len(sizes)

    def sound(self, backend: Backend, names: Collection[str]) -> None:
        """Assert that each of the keys `names` has either a whole value or none."""
        for name in names:
            value = backend.get(name)
            assert value is None or intact(name, value), f"a torn or mixed value under {name}"
