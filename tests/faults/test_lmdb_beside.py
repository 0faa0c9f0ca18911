"""LMDB beside stopped processes, garbage collections and full disks: the cache recovers."""

import gc
import os
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from core.helpers import in_child, key, run_all
from faults.places import disk_usage, has, is_whole, put_all, sealed, stopped
from faults.stepper import Stepper

from kcache import CacheEngine, open_engine
from kcache.util import locks
from kcache.util.open_file import OwnFile, open_own
from kcache_backends import _lmdb_environment, _lmdb_files

OPENING, WRITING = 0, 1
CAP = 2_000_000
#: How long a writer waits for another process in these tests, in seconds.
PATIENCE = 0.3


def opened(place: Path) -> CacheEngine:
    return open_engine(place, backend="lmdb", max_size=CAP)


def fill(place: Path, count: int = 20) -> None:
    def work() -> None:
        with opened(place) as engine:
            put_all(engine, range(count), 1, 3000)

    in_child(work)


def write_and_stop(place: Path, stop: Callable[[], None]) -> None:
    with opened(place) as engine, engine.backend.batch():
        stop()


def open_and_stop(place: Path, stop: Callable[[], None]) -> None:
    with open_own(str(place / "lmdb" / "lock"), os.O_RDWR) as file:
        assert locks.lock(file, OPENING)
        stop()


def all_hit(engine: CacheEngine, count: int = 20) -> None:
    for number in range(count):
        assert has(engine, number)


@pytest.fixture
def vain(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The timeouts, in seconds, of the waits for a lock that did not acquire it."""
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


def test_a_put_waits_once_for_a_stopped_writer(tmp_path: Path, vain: list[float]) -> None:
    fill(tmp_path)
    with opened(tmp_path) as engine, stopped(partial(write_and_stop, tmp_path)):
        all_hit(engine)  # the database was already open
        assert not engine.put(key(50), sealed(50, 1, 100))
        assert not engine.put(key(50), sealed(50, 1, 100))
        assert vain.count(PATIENCE) == 1
        engine.backend.close()
        with opened(tmp_path) as other:
            all_hit(other)  # opened while the other process is stopped
            assert other.get(key(99)) is None
            assert other.entry_count == 20
            assert other.stats().errors == 0
            in_child(lambda: all_hit(other))
    with opened(tmp_path) as engine:
        assert engine.put(key(50), sealed(50, 2, 100))
        all_hit(engine)
        assert engine.get(key(50))


def test_after_a_short_wait_a_put_still_waits(tmp_path: Path, vain: list[float]) -> None:
    fill(tmp_path)
    with opened(tmp_path) as engine, stopped(partial(write_and_stop, tmp_path)):
        engine.backend.touch(key(1))
        assert len(list(engine.backend.scan())) == 20
        assert vain == [_lmdb_environment.SHORT_WAIT]
        assert not engine.put(key(50), sealed(50, 1, 100))
        assert vain.count(PATIENCE) == 1


def test_one_wait_for_a_process_stopped_in_its_open(tmp_path: Path, vain: list[float]) -> None:
    fill(tmp_path)
    with stopped(partial(open_and_stop, tmp_path)), opened(tmp_path) as engine:
        assert engine.get(key(1)) is None
        assert engine.get(key(2)) is None
        assert not engine.put(key(1), sealed(1, 2, 100))
        assert vain.count(PATIENCE) == 1
    with opened(tmp_path) as engine:
        all_hit(engine)


def test_the_threads_of_a_process_wait_at_the_same_time(tmp_path: Path, vain: list[float]) -> None:
    fill(tmp_path)
    with opened(tmp_path) as engine, stopped(partial(write_and_stop, tmp_path)):
        all_hit(engine)

        puts = [partial(engine.put, key(n), sealed(n, 2, 100)) for n in range(8)]
        assert not any(run_all(*puts))
        assert vain.count(PATIENCE) == 1


def test_a_database_that_a_thread_opens_while_another_one_frees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freeing an engine once closed the database during a transaction of another thread."""
    freeing, real, first = threading.Event(), _lmdb_files.leads_to, opened(tmp_path)
    assert first.put(key(1), sealed(1, 1, 100))
    engines = [first]
    del first
    freer = threading.Thread(target=engines.clear)

    def leads_to(number: int, file: tuple[int, int]) -> bool:
        if threading.current_thread() is freer and not freeing.is_set():
            freeing.set()
            time.sleep(0.3)
        return real(number, file)

    monkeypatch.setattr(_lmdb_files, "leads_to", leads_to)
    freer.start()
    assert freeing.wait(60)
    with opened(tmp_path) as engine:
        with engine.backend.batch():
            assert engine.put(key(2), sealed(2, 1, 100))
            freer.join()
        assert has(engine, 1)
        assert has(engine, 2)


def read_and_stop(place: Path, stop: Callable[[], None]) -> None:
    with opened(place) as engine:
        environment = engine.backend._environment  # type: ignore[attr-defined]
        environment.read(lambda txn: (txn.get(b"c"), stop()))
        found = [engine.get(key(number)) for number in range(2000)]
        assert all(is_whole(n, each) for n, each in enumerate(found) if each)


@pytest.mark.timeout(600)
def test_a_stopped_reader_costs_the_entries_once(tmp_path: Path, long: bool) -> None:
    """The reader's snapshot keeps its pages, so the map is full until the database is replaced."""
    rounds = 20_000 if long else 900
    data = tmp_path / "lmdb" / "db" / "data.mdb"
    with opened(tmp_path) as engine:
        put_all(engine, range(300), 1, 6000)
        engine.backend.usage()
        cleared = 0
        with stopped(partial(read_and_stop, tmp_path)):
            for number in range(300, rounds):
                before = engine.entry_count
                assert engine.put(key(number), sealed(number, 1, 6000))
                cleared += engine.entry_count < before / 2
                assert has(engine, number)
                assert engine.size_bytes <= CAP
                assert data.stat().st_size <= 2 * CAP + 4096
            assert cleared == 1
            assert engine.stats().errors == engine.stats().corrupt == 0
        put_all(engine, range(100), 2, 6000)
        assert all(has(engine, number) for number in range(100))
        assert engine.stats().errors == engine.stats().corrupt == engine.stats().rejected == 0
        assert list(engine.backend.check()) == []
        assert sorted(os.listdir(tmp_path / "lmdb")) == ["db", "lock"]


# -- caches that nobody closes: the garbage collector drops them -----------------------------------


class Cycle:
    """A reference cycle with an engine, which only the garbage collector can free."""

    def __init__(self, engine: CacheEngine) -> None:
        self.engine = engine
        self.itself = self


@pytest.mark.timeout(600)
def test_a_dropped_cache_is_collected_at_any_point_of_another(tmp_path: Path, long: bool) -> None:
    """The finalizer of a cache runs in a thread that opens or writes to the same directory."""
    steps: list[Stepper] = []

    def drop() -> None:
        other = opened(tmp_path)
        assert other.get(key(1))  # the use is stored when the engine is freed
        Cycle(other)

    def work(number: int) -> None:
        with opened(tmp_path) as engine:
            puts = [partial(engine.put, key(n), sealed(n, number + 2, 2000)) for n in range(2)]
            steps.append(Stepper(number, gc.collect, ("/_lmdb", "/lmdb.py", "/locks.py")))
            steps[-1].run(puts[0])
            shutil.rmtree(tmp_path / "lmdb", ignore_errors=True)
            for put in puts:
                steps[-1].run(put)

    fill(tmp_path, 2)
    gc.disable()
    gc.freeze()  # so that collections skip objects of other tests
    try:
        work(-1)
        for number in range(0, steps[0].points, 1 if long else steps[0].points // 12):
            drop()
            thread = threading.Thread(target=work, args=(number,), daemon=True)
            thread.start()
            thread.join(60)
            assert not thread.is_alive(), f"the thread still waits at point {number}"
            assert steps[-1].points > number
    finally:
        gc.unfreeze()
        gc.enable()
        gc.collect()
    with opened(tmp_path) as engine:
        all_hit(engine, 2)


# -- a disk that its own entries fill --------------------------------------------------------------

AMPLE = 64 << 20


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [3000, 60_000, 1_500_000])
def test_a_disk_smaller_than_the_cap(size: int, disk: Path, long: bool) -> None:
    count = (12 << 20) // max(size, 4096) * (8 if long else 2)
    with open_engine(disk / "cache", backend="lmdb", max_size=AMPLE) as engine:
        failed = [n for n in range(count) if not engine.put(key(n), sealed(n, 1, size))]
        # Entries smaller than a page share pages, so it takes several evictions to free one.
        assert len(failed) <= (count // 100 if size < 4096 else 0), failed
        held = [number for number in range(count) if engine.get(key(number)) is not None]
        assert held == [n for n in range(held[0], count) if n not in failed], "warmer ones evicted"
        assert len(held) * max(size, 4096) > 8 << 20, "too many entries were evicted"
        for number in held[::10]:
            assert has(engine, number)
        # The statistics can't be written, either.
        assert engine.stats().errors <= len(failed) + 1
        assert disk_usage(disk) <= 16 << 20
        assert list(engine.backend.check()) == []
