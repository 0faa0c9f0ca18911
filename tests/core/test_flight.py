"""Single flight: one of many creates the entry, and the others wait for it for a bounded time."""

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from core.helpers import entry, fork, key, together, wait
from faults.places import stopped

from kcache import CacheEngine, Entry, open_engine
from kcache.backend import open_backend
from kcache.util.locks import is_locked
from kcache.util.open_file import open_own

KEY = key("flight")
LONG = 60.0
MADE = entry(10)
linux = pytest.mark.skipif(sys.platform != "linux", reason="byte locks of open files need Linux")


class Shelf:
    """A cache, and a file that gets one byte whenever any process creates the entry."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "cache"
        self.lock_file = str(folder / "flight")
        self._created = folder / "created"
        self._created.touch()

    def open(self, seconds: float = LONG, *, shared: bool = True) -> CacheEngine:
        """Open an engine. With `shared`, only one process at a time creates the entry."""
        backend = open_backend("file", str(self.folder), max_size=10**6)
        return CacheEngine(
            backend,
            max_size=10**6,
            lock_file=self.lock_file if shared else None,
            wait=seconds,
        )

    def create(self) -> Entry:
        with self._created.open("ab", buffering=0) as file:
            file.write(b".")
        return MADE

    @property
    def times(self) -> int:
        return self._created.stat().st_size

    def ask(self) -> None:
        """Get or create the entry with an engine of its own."""
        with closing(self.open()) as engine:
            assert engine.get_or_create(KEY, self.create) == MADE

    def lead(self, stop: Callable[[], None]) -> None:
        """Start to create the entry, and call `stop` before it exists."""
        with closing(self.open()) as engine:
            engine.get_or_create(KEY, lambda: (stop(), self.create())[1])


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    signal.alarm(100)  # ends a test that waits forever
    yield Shelf(tmp_path)
    signal.alarm(0)


@pytest.fixture(params=[False, True], ids=["threads", "processes"])
def engine(shelf: Shelf, request: pytest.FixtureRequest) -> Iterator[CacheEngine]:
    with closing(shelf.open(shared=request.param)) as opened:
        yield opened


def test_one_thread_creates_and_all_get_it(engine: CacheEngine, shelf: Shelf) -> None:
    found = together(16, lambda: engine.get_or_create(KEY, shelf.create))
    assert (found, shelf.times) == ([MADE] * 16, 1)


def test_create_may_ask_for_the_same_key(engine: CacheEngine, shelf: Shelf) -> None:
    nested = engine.get_or_create(KEY, lambda: engine.get_or_create(KEY, shelf.create))
    assert nested == MADE


def test_an_error_of_create_reaches_every_thread(engine: CacheEngine) -> None:
    def create() -> Entry:
        raise KeyError("mine")

    found = together(4, lambda: engine.get_or_create(KEY, create))
    assert [repr(each) for each in found] == ["KeyError('mine')"] * 4
    assert engine.stats().misses == 4


@linux
def test_one_process_creates_and_all_get_it(tmp_path: Path, shelf: Shelf) -> None:
    def ask() -> None:
        with open_engine(tmp_path / "directory") as engine:
            assert engine.get_or_create(KEY, shelf.create) == MADE

    children = [fork(ask) for _ in range(12)]
    assert [wait(each) for each in children] == [0] * 12
    with open_engine(tmp_path / "directory") as engine:
        stats = engine.total_stats()
    assert (shelf.times, stats.misses, stats.hits) == (1, 1, 11)


@linux
@pytest.mark.parametrize("end", ["killed", "failed"])
def test_a_leader_that_ends_is_replaced_by_one(end: str, shelf: Shelf) -> None:
    def fail(stop: Callable[[], None]) -> None:
        def create() -> Entry:
            stop()
            raise KeyError("mine")

        with closing(shelf.open()) as engine, pytest.raises(KeyError):
            engine.get_or_create(KEY, create)

    how = (shelf.lead, signal.SIGKILL) if end == "killed" else (fail, signal.SIGCONT)
    with stopped(*how):
        others = [fork(shelf.ask) for _ in range(8)]
    assert [wait(each) for each in others] == [0] * 8
    assert shelf.times == 1


@linux
def test_the_lock_does_not_outlive_its_process_in_a_child(shelf: Shelf) -> None:
    """A child that is forked while its parent creates an entry does not keep the parent's lock."""
    life, end = os.pipe()

    def fork_and_stop(stop: Callable[[], None]) -> None:
        if os.fork() == 0:
            os.close(end)
            os.read(life, 1)  # lives as long as the test
            os._exit(0)
        stop()

    with stopped(lambda stop: shelf.lead(lambda: fork_and_stop(stop)), signal.SIGKILL):
        pass
    with closing(shelf.open()) as engine:
        assert engine.get_or_create(KEY, shelf.create) == MADE
        stats = engine.stats()
    assert (stats.coalesced, stats.wait_timeouts, stats.unlocked) == (0, 0, 0)
    os.close(end)
    os.close(life)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EINVAL])
def test_without_locks_each_process_creates(
    code: int, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> bool:
        raise OSError(code, "no locks")

    monkeypatch.setattr("kcache.util.log._logged", set())  # each process warns once
    with closing(shelf.open()) as engine:
        engine.backend.usage()
        monkeypatch.setattr("kcache.util.locks._range_lock", refuse)
        assert together(4, lambda: engine.get_or_create(KEY, shelf.create)) == [MADE] * 4
        assert (shelf.times, engine.stats().unlocked >= 1) == (1, True)
    assert any(record.levelname == "WARNING" for record in caplog.records)


@linux
def test_the_lock_of_a_key_is_at_its_documented_place(shelf: Shelf) -> None:
    """The lock is on the documented bytes, which other implementations of the format lock, too."""

    def lead(stop: Callable[[], None]) -> None:
        # Closing another descriptor of the file must not release the lock.
        shelf.lead(lambda: (Path(shelf.lock_file).read_bytes(), stop()))

    with stopped(lead):
        with open_own(shelf.lock_file, os.O_RDWR) as file:
            offset = 16 + (int(KEY[:16], 16) >> 2)
            held = [is_locked(file, offset + at) for at in (-1, 0, 1)]
        assert Path(shelf.lock_file).read_bytes() == b"kcache-flight/2\0"
    assert held == [False, True, False]


# -- waits for a leader that hangs -----------------------------------------------------------------


@contextmanager
def hanging(engine: CacheEngine) -> Iterator[None]:
    """Run a thread that is creating the entry, and finishes only after the block."""
    begun, go = threading.Event(), threading.Event()

    def create() -> Entry:
        begun.set()
        assert go.wait(LONG)
        return MADE

    thread = threading.Thread(target=lambda: engine.get_or_create(KEY, create))
    thread.start()
    assert begun.wait(LONG)
    yield
    go.set()
    thread.join(LONG)


@pytest.mark.parametrize("leader", ["a thread", "a thread with a lock", "another process"])
def test_of_many_threads_whose_wait_times_out_one_creates(leader: str, shelf: Shelf) -> None:
    """If the wait of 24 threads times out at the same time, one of them creates the entry."""
    with (
        closing(shelf.open(1.0, shared=leader != "a thread")) as engine,
        stopped(shelf.lead) if leader == "another process" else hanging(engine),
    ):
        found = together(24, lambda: engine.get_or_create(KEY, shelf.create))
        assert (found, shelf.times) == ([MADE] * 24, 1)
        assert engine.stats().wait_timeouts > 0


def test_a_successor_that_hangs_too_is_replaced(shelf: Shelf) -> None:
    with closing(shelf.open(1.0, shared=False)) as engine, hanging(engine):
        over, calls = threading.Event(), iter(range(99))

        def create() -> Entry:
            if next(calls) == 0:  # the first thread whose wait timed out
                assert over.wait(LONG)
            over.set()
            return shelf.create()

        assert together(6, lambda: engine.get_or_create(KEY, create)) == [MADE] * 6
        assert shelf.times == 2


@linux
def test_of_many_processes_whose_wait_times_out_one_creates(shelf: Shelf) -> None:
    def ask() -> None:
        with closing(shelf.open(1.0)) as engine:
            assert engine.get_or_create(KEY, shelf.create) == MADE

    with stopped(shelf.lead):
        children = [fork(ask) for _ in range(4)]
        assert [wait(each) for each in children] == [0] * 4
        assert shelf.times == 1
