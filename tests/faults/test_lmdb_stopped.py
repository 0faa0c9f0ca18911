"""LMDB beside a process that is stopped: reads go on, nothing waits twice, and after it all is well."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from core.helpers import fork, key, wait
from faults.places import is_whole, sealed

from kcache import CacheEngine, open_engine
from kcache.util import locks
from kcache.util.open_file import OwnFile, open_own
from kcache_backends import _lmdb_environment

OPENING, WRITING = 0, 1
CAP = 2_000_000
#: How long a writer waits for another process in these tests, in seconds.
PATIENCE = 0.3


def opened(place: Path) -> CacheEngine:
    return open_engine(place, backend="lmdb", max_size=CAP)


@contextmanager
def stopped(work: Callable[[Callable[[], None]], object]) -> Iterator[int]:
    """Runs `work` in a child, which stops where it calls its argument; goes on after the block."""

    def child() -> None:
        work(lambda: os.kill(os.getpid(), signal.SIGSTOP))

    pid = fork(child, limit=600)
    try:
        _, status = os.waitpid(pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), f"it ended instead: {status}"
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)
        assert wait(pid) == 0


def fill(place: Path, count: int = 20) -> None:
    def work() -> None:
        with opened(place) as engine:
            for number in range(count):
                assert engine.put(key(number), sealed(number, 1, 3000))

    assert wait(fork(work)) == 0


def write_and_stop(place: Path) -> Callable[[Callable[[], None]], object]:
    def work(stop: Callable[[], None]) -> None:
        with opened(place) as engine, engine.backend.batch():
            stop()

    return work


def open_and_stop(place: Path) -> Callable[[Callable[[], None]], object]:
    def work(stop: Callable[[], None]) -> None:
        with open_own(str(place / "lmdb" / "lock"), os.O_RDWR) as file:
            assert locks.lock(file, OPENING)
            stop()

    return work


def all_hit(engine: CacheEngine, count: int = 20) -> None:
    for number in range(count):
        found = engine.get(key(number))
        assert found is not None
        assert is_whole(number, found)


@pytest.fixture
def vain(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each wait for a lock was that was in vain."""
    waited: list[float] = []
    real = locks.lock

    def lock(file: OwnFile, start: int, length: int = 1, *, timeout: float = 0.0) -> bool:
        try:
            return real(file, start, length, timeout=timeout)
        except TimeoutError:
            waited.append(timeout)
            raise

    monkeypatch.setattr(locks, "lock", lock)
    monkeypatch.setattr(_lmdb_environment, "PATIENCE", PATIENCE)
    return waited


def test_a_hit_waits_for_no_stopped_writer_and_a_put_waits_once(
    tmp_path: Path, vain: list[float]
) -> None:
    fill(tmp_path)
    with opened(tmp_path) as engine, stopped(write_and_stop(tmp_path)):
        all_hit(engine)  # it was open already
        assert engine.put(key(50), sealed(50, 1, 100)) is False
        assert engine.put(key(50), sealed(50, 1, 100)) is False
        assert vain.count(PATIENCE) == 1
        engine.backend.close()
        with opened(tmp_path) as other:
            all_hit(other)  # opened beside the stopped one
            assert other.get(key(99)) is None
            assert other.entry_count == 20
            assert other.stats().errors == 0
            assert wait(fork(lambda: all_hit(other))) == 0
    with opened(tmp_path) as engine:
        assert engine.put(key(50), sealed(50, 2, 100))
        all_hit(engine)
        assert engine.get(key(50))


def test_who_is_stopped_while_it_opens_is_waited_for_once(
    tmp_path: Path, vain: list[float]
) -> None:
    fill(tmp_path)
    with stopped(open_and_stop(tmp_path)), opened(tmp_path) as engine:
        assert engine.get(key(1)) is None
        assert engine.get(key(2)) is None
        assert engine.put(key(1), sealed(1, 2, 100)) is False
        assert vain.count(PATIENCE) == 1
    with opened(tmp_path) as engine:
        all_hit(engine)


def test_the_threads_of_a_process_wait_at_the_same_time(tmp_path: Path, vain: list[float]) -> None:
    fill(tmp_path)
    failed: list[bool] = []
    with opened(tmp_path) as engine, stopped(write_and_stop(tmp_path)):
        all_hit(engine)

        def put(number: int) -> None:
            failed.append(engine.put(key(number), sealed(number, 2, 100)))

        threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == [False] * 8
        assert vain.count(PATIENCE) == 1


def test_a_fork_waits_for_no_thread_that_waits_for_a_stopped_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    waiting, over = threading.Event(), threading.Event()
    real = locks._range_lock

    def acquire(fd: int, start: int, length: int) -> bool:
        taken = real(fd, start, length)
        if start == WRITING and not taken:
            waiting.set()
            assert over.wait(60)
        return taken

    with opened(tmp_path) as engine, stopped(write_and_stop(tmp_path)):
        all_hit(engine)
        with monkeypatch.context() as patch:
            patch.setattr(locks, "_range_lock", acquire)
            patch.setattr(_lmdb_environment, "FORK_PATIENCE", 30.0)
            writer = threading.Thread(
                target=lambda: engine.backend.batch().__enter__(), daemon=True
            )
            writer.start()
            assert waiting.wait(60)
            for _ in range(3):
                assert wait(fork(lambda: all_hit(engine))) == 0
        over.set()
        all_hit(engine)
    writer.join()


def read_and_stop(place: Path) -> Callable[[Callable[[], None]], object]:
    def work(stop: Callable[[], None]) -> None:
        with opened(place) as engine:
            environment = engine.backend._environment  # type: ignore[attr-defined]
            environment.read(lambda txn: (txn.get(b"c"), stop()))
            found = [engine.get(key(number)) for number in range(2000)]
            assert all(is_whole(n, each) for n, each in enumerate(found) if each)

    return work


@pytest.mark.timeout(600)
def test_a_reader_that_is_stopped_costs_the_entries_once_and_no_put(
    tmp_path: Path, long: bool
) -> None:
    """Its snapshot keeps every page that was in use. Otherwise the map would stay full for ever."""
    rounds = 20_000 if long else 900
    data = tmp_path / "lmdb" / "db" / "data.mdb"
    with opened(tmp_path) as engine:
        for number in range(300):
            assert engine.put(key(number), sealed(number, 1, 6000))
        engine.backend.usage()
        cleared = 0
        with stopped(read_and_stop(tmp_path)):
            for number in range(300, rounds):
                before = engine.entry_count
                assert engine.put(key(number), sealed(number, 1, 6000))
                cleared += engine.entry_count < before / 2
                found = engine.get(key(number))
                assert found is not None
                assert is_whole(number, found)
                assert engine.size_bytes <= CAP
                assert data.stat().st_size <= 2 * CAP + 4096
            assert cleared == 1
            assert engine.stats().errors == engine.stats().corrupt == 0
        for number in range(100):
            assert engine.put(key(number), sealed(number, 2, 6000))
            assert engine.get(key(number))
        assert engine.stats().errors == engine.stats().corrupt == engine.stats().rejected == 0
        assert list(engine.backend.check()) == []
        assert sorted(os.listdir(tmp_path / "lmdb")) == ["db", "lock"]
