"""LMDB beside a process that is stopped: reads go on, nothing waits twice, and after it all is well."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from core.helpers import fork, key, wait
from faults.places import is_whole, sealed

from kcache import CacheEngine, open_engine
from kcache_backends import _lmdb_connection, _lmdb_locks
from kcache_backends import _lmdb_environment as environment_module
from kcache_backends._lmdb_folder import Folder
from kcache_backends._lmdb_locks import LockFile, given_up

OPENING, WRITING = 0, 1
CAP = 2_000_000


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


def hold(place: Path, *which: int) -> Callable[[Callable[[], None]], object]:
    def work(stop: Callable[[], None]) -> None:
        with Folder(str(place / "lmdb")) as root:
            file = LockFile(root)
            if len(which) == 1:
                with file.held(which[0], 5):
                    stop()
            else:
                with file.held(which[0], 5), file.held(which[1], 5):
                    stop()

    return work


def all_hit(engine: CacheEngine, count: int = 20) -> None:
    for number in range(count):
        found = engine.get(key(number))
        assert found is not None
        assert is_whole(number, found)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long every wait for another process was allowed to last."""
    allowed: list[float] = []
    real = LockFile.held

    def held(file: LockFile, start: int, timeout: float) -> object:
        allowed.append(timeout)
        return real(file, start, min(timeout, 0.2))

    monkeypatch.setattr(LockFile, "held", held)
    given_up.clear()
    return allowed


@pytest.mark.parametrize("which", [(OPENING,), (WRITING,), (WRITING, OPENING)], ids=str)
def test_a_hit_waits_for_no_stopped_process(
    which: tuple[int, ...], tmp_path: Path, waits: list[float]
) -> None:
    fill(tmp_path)
    with opened(tmp_path) as engine:
        all_hit(engine)
        with stopped(hold(tmp_path, *which)):
            del waits[:]
            all_hit(engine)  # open already
            engine.backend.close()
        with stopped(hold(tmp_path, *which)), opened(tmp_path) as other:
            all_hit(other)  # opened beside the stopped one
            assert other.get(key(99)) is None
            assert other.entry_count == 20
            assert max(waits, default=0.0) <= environment_module.HARDLY
            assert other.stats().errors == 0
            assert other.put(key(50), sealed(50, 1, 100)) is False
            assert other.put(key(50), sealed(50, 1, 100)) is False
            all_hit(other)
            assert [limit for limit in waits if limit > environment_module.HARDLY] == [
                environment_module.PATIENCE
            ]
            assert wait(fork(lambda: all_hit(other))) == 0
    with opened(tmp_path) as engine:
        assert engine.put(key(50), sealed(50, 2, 100))
        all_hit(engine)
        assert engine.get(key(50))


def test_the_threads_of_a_process_wait_at_the_same_time_and_once(
    tmp_path: Path, waits: list[float]
) -> None:
    fill(tmp_path)
    with opened(tmp_path) as engine, stopped(hold(tmp_path, WRITING)):
        all_hit(engine)  # open again after the fork
        del waits[:]
        threads = [
            threading.Thread(target=engine.backend.put, args=(key(1), b"1")) for _ in range(8)
        ]
        failed: list[BaseException | None] = []
        threading.excepthook, before = (
            lambda args: failed.append(args.exc_value),
            threading.excepthook,
        )
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            threading.excepthook = before
        assert len(failed) == 8
        assert waits.count(environment_module.PATIENCE) == 1
        # A new object for the same directory has not forgotten it.
        engine.close()
        with opened(tmp_path) as other:
            assert not other.put(key(1), sealed(1, 2, 100))
        assert waits.count(environment_module.PATIENCE) == 1


def test_a_fork_waits_for_no_thread_that_waits_for_a_stopped_process(
    tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    waiting, over = threading.Event(), threading.Event()
    real = LockFile.held

    @contextmanager
    def held(file: LockFile, start: int, timeout: float) -> Iterator[None]:
        if timeout > 1:
            waiting.set()
            assert over.wait(60)
        with real(file, start, timeout):
            yield

    with opened(tmp_path) as engine, stopped(hold(tmp_path, WRITING)):
        all_hit(engine)
        monkeypatch.setattr(LockFile, "held", held)
        writer = threading.Thread(target=engine.put, args=(key(1), sealed(1, 2, 100)))
        writer.start()
        assert waiting.wait(60)
        monkeypatch.setattr(_lmdb_connection, "FORK_PATIENCE", 30.0)
        for _ in range(3):
            assert wait(fork(lambda: all_hit(engine))) == 0
        over.set()
        writer.join()
        all_hit(engine)


def exchange_and_stop(place: Path, at: int) -> Callable[[Callable[[], None]], object]:
    """Compacts the database, and stops at the n-th change of a name."""

    def work(stop: Callable[[], None]) -> None:
        count = 0
        real = Folder.rename

        def rename(folder: Folder, old: str, new: str) -> None:
            nonlocal count
            count += 1
            if count == at:
                stop()
            real(folder, old, new)
            if count == at - 2:
                stop()

        Folder.rename = rename  # type: ignore[method-assign]
        with opened(place) as engine:
            environment = engine.backend._environment  # type: ignore[attr-defined]
            with environment.writing() as txn:
                environment.exchange(txn)
            assert environment.renew()

    return work


@pytest.mark.parametrize("at", [1, 2, 4], ids=["before", "between", "after"])
def test_hits_go_on_while_an_exchange_is_stopped(
    at: int, tmp_path: Path, waits: list[float]
) -> None:
    fill(tmp_path)
    with opened(tmp_path) as engine:
        all_hit(engine)
        with stopped(exchange_and_stop(tmp_path, at)):
            del waits[:]
            all_hit(engine)
            assert engine.get(key(99)) is None
            with opened(tmp_path) as other:
                assert other is not engine
                all_hit(other)
            assert wait(fork(lambda: all_hit(engine))) == 0
            assert max(waits, default=0.0) <= environment_module.HARDLY
            assert not engine.put(key(30), sealed(30, 1, 100))
            all_hit(engine)
        assert engine.get(key(99)) is None
        all_hit(engine)
        assert engine.put(key(30), sealed(30, 1, 100))
        assert engine.get(key(30))
        assert engine.entry_count == 21
        assert list(engine.backend.check()) == []


def read_and_stop(place: Path) -> Callable[[Callable[[], None]], object]:
    def work(stop: Callable[[], None]) -> None:
        with opened(place) as engine:
            env = engine.backend._environment.get()  # type: ignore[attr-defined]
            with env.begin() as txn:
                assert txn.get(b"c")
                stop()
            found = [engine.get(key(number)) for number in range(2000)]
            assert all(is_whole(n, each) for n, each in enumerate(found) if each)

    return work


@pytest.mark.timeout(600)
def test_a_reader_that_is_stopped_costs_nothing_but_the_coldest(tmp_path: Path, long: bool) -> None:
    """Its snapshot keeps every page that was in use; without an exchange half the puts failed."""
    rounds = 20_000 if long else 1500
    data = tmp_path / "lmdb" / "db" / "data.mdb"
    with opened(tmp_path) as engine:
        for number in range(300):
            assert engine.put(key(number), sealed(number, 1, 6000))
        engine.backend.usage()
        started = time.monotonic()
        with stopped(read_and_stop(tmp_path)):
            number = 300
            while number < rounds or (long and time.monotonic() - started < 30):
                assert engine.put(key(number), sealed(number, 1, 6000))
                found = engine.get(key(number))
                assert found is not None
                assert is_whole(number, found)
                # The coldest go, the others stay: the cap holds some 240, a tenth goes at a time.
                assert all(engine.get(key(n)) for n in range(number - 150, number, 15))
                assert engine.size_bytes <= CAP
                assert data.stat().st_size <= 2 * CAP + 4096
                number += 1
            assert engine.stats().errors == engine.stats().corrupt == 0
        for number in range(100):
            assert engine.put(key(number), sealed(number, 2, 6000))
            assert engine.get(key(number))
        assert engine.stats().errors == engine.stats().corrupt == engine.stats().rejected == 0
        assert list(engine.backend.check()) == []
        assert sorted(os.listdir(tmp_path / "lmdb")) == ["db", "lock"]


def test_a_holder_that_comes_back_again_and_again_lets_a_waiter_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    monkeypatch.setattr(_lmdb_locks, "_TURN_PATIENCE", 60.0)
    order: list[str] = []
    with Folder(str(tmp_path / "lmdb")) as root:
        holder, waiter = LockFile(root), LockFile(root)

        def wait_for_it() -> None:
            with waiter.held(WRITING, 60):
                order.append("waiter")

        thread = threading.Thread(target=wait_for_it)
        with holder.held(WRITING, 5):
            thread.start()
            while not is_waited_for(root):
                time.sleep(0.001)
        for _ in range(_lmdb_locks._TURNS):
            with holder.held(WRITING, 60):
                order.append("holder")
        seen = list(order)
        thread.join()
    assert "waiter" in seen


def is_waited_for(root: Folder) -> bool:
    try:
        with LockFile(root).held(WRITING + _lmdb_locks._TURN, 0):
            return False
    except TimeoutError:
        return True


def test_who_was_stopped_while_it_waited_blocks_nobody(tmp_path: Path) -> None:
    fill(tmp_path)
    with stopped(hold(tmp_path, WRITING + _lmdb_locks._TURN)), opened(tmp_path) as engine:
        for number in range(20):
            assert engine.put(key(number), sealed(number, 2, 3000))
        all_hit(engine)
