"""LMDB, closed, opened, removed, forked and dropped beside puts: no foreign file changes, all end."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from random import Random

import pytest
from core.helpers import fork, key, wait
from faults.places import is_whole, sealed

from kcache import BackendError, CacheEngine, ConfigError, open_engine
from kcache_backends._lmdb_environment import Environment
from kcache_backends.lmdb import LmdbBackend

NAMES = pytest.mark.parametrize("name", ["lmdb", "zstd+lmdb"])
CAP = 1_000_000


class ForeignFiles:
    """A hundred open files of somebody's, at numbers that are given out again and again."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._paths = [folder / str(number) for number in range(100)]
        for path in self._paths:
            path.write_bytes(b"somebody's " * 1000)
        self._open = [path.open("r+b", buffering=0) for path in self._paths]

    def shuffle(self, random: Random) -> None:
        """Closes some and opens them again, so that they take what numbers are free."""
        for number in random.sample(range(100), 5):
            self._open[number].close()
            self._open[number] = self._paths[number].open("r+b", buffering=0)

    def check(self) -> None:
        for path, file in zip(self._paths, self._open, strict=True):
            assert path.read_bytes() == b"somebody's " * 1000
            assert os.path.samestat(os.fstat(file.fileno()), path.stat())

    def close(self) -> None:
        for file in self._open:
            file.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@NAMES
@pytest.mark.timeout(3600)
def test_rounds_beside_puts_change_no_foreign_file_and_leak_nothing(
    name: str, tmp_path: Path, long: bool
) -> None:
    random = Random(name)
    place = tmp_path / "cache"
    files = ForeignFiles(tmp_path / "foreign")
    gc.collect()
    before = descriptors()
    over = threading.Event()
    wrong: list[str] = []
    engines = [open_engine(place, backend=name, max_size=CAP)]

    def put(thread: int) -> None:
        number = 0
        while not over.is_set():
            number += 1
            engine = engines[-1]
            which = (thread * 1000 + number) % 40
            engine.put(key(which), sealed(which, number, 2000))
            found = engine.get(key(which))
            if found is not None and not is_whole(which, found):
                wrong.append(f"{which}")

    def round_of(number: int) -> None:
        kind = number % 4
        if kind == 0:
            shutil.rmtree(place, ignore_errors=True)
        elif kind == 1 and number % 40 == 1:
            assert wait(fork(lambda: engines[-1].get(key(1)))) == 0
        else:
            with suppress(ConfigError):  # a put has made a folder in what was being removed
                engines.append(open_engine(place, backend=name, max_size=CAP))
                if kind == 2:
                    engines[0].close()
                engines.pop(0)  # in half of the cases it is closed by nobody
        if number % 10 == 0:
            files.shuffle(random)
        if number % 100 == 0:
            files.check()
            gc.collect()

    with ThreadPoolExecutor(3) as pool:
        putting = [pool.submit(put, thread) for thread in range(3)]
        try:
            for number in range(20_000 if long else 600):
                round_of(number)
        finally:
            over.set()
        for each in putting:
            each.result(60)
    engines.pop().close()
    files.check()
    gc.collect()
    assert wrong == []
    assert descriptors() == before
    with open_engine(place, backend=name, max_size=CAP) as engine:
        assert engine.put(key(1), sealed(1, 1, 100))
        assert engine.get(key(1))
    files.close()


@NAMES
@pytest.mark.timeout(1800)
def test_forks_beside_threads_that_put_end_and_may_go_on(
    name: str, tmp_path: Path, long: bool
) -> None:
    over = threading.Event()
    with open_engine(tmp_path, backend=name, max_size=CAP) as engine:

        def put(thread: int) -> None:
            number = 0
            while not over.is_set():
                number += 1
                engine.put(key(number % 40), sealed(number % 40, thread, 3000))
                engine.get(key(number % 40))

        def child() -> None:
            for number in range(3):
                assert engine.put(key(number), sealed(number, 9, 3000))
                found = engine.get(key(number))
                assert found is not None
                assert is_whole(number, found)
            gc.collect()

        with ThreadPoolExecutor(4) as pool:
            putting = [pool.submit(put, thread) for thread in range(4)]
            try:
                for _ in range(400 if long else 25):
                    assert wait(fork(child)) == 0
            finally:
                over.set()
            for each in putting:
                each.result(60)
        assert engine.stats().errors == 0
        assert list(engine.backend.check()) == []


EXITS = """
import os, sys, threading
from kcache import Entry, open_engine
engine = open_engine(sys.argv[1], backend=sys.argv[2], max_size=1_000_000)
begun = threading.Barrier(5)
def put(thread):
    number = 0
    begun.wait()
    while True:
        number += 1
        try:
            engine.put(f"{number % 40:064x}", Entry({"a": os.urandom(3000)}, {}))
            engine.get(f"{number % 30:064x}")
        except NameError:
            return  # dropped; Python aborts where a daemon thread is printing a traceback as it ends
for thread in range(4):
    threading.Thread(target=put, args=(thread,), daemon=True).start()
begun.wait()
for _ in range(int(sys.argv[3])):
    engine.get("0" * 64)
if sys.argv[4] == "close":
    engine.close()
if sys.argv[4] == "drop":
    del engine
sys.exit(7)
"""


@NAMES
@pytest.mark.timeout(1800)
def test_interpreters_end_beside_daemon_threads(name: str, tmp_path: Path, long: bool) -> None:
    for number in range(200 if long else 8):
        how = ("close", "drop", "leave")[number % 3]
        done = subprocess.run(
            [sys.executable, "-c", EXITS, str(tmp_path), name, str(number % 50 * 10), how],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 7, (how, done.returncode, done.stderr[-2000:])
    with open_engine(tmp_path, backend=name, max_size=CAP) as engine:
        assert engine.put(key(1), sealed(1, 1, 100))
        assert list(engine.backend.check()) == []


# -- owners that nobody closes ---------------------------------------------------------------------


class Cycle:
    """Rubbish that holds an engine, and that only the garbage collector finds."""

    def __init__(self, engine: CacheEngine) -> None:
        self.engine = engine
        self.itself = self


@pytest.mark.timeout(120)
@pytest.mark.parametrize("method", ["_refresh", "_open", "_locked", "_begin", "is_replaced"])
def test_a_dropped_cache_collected_in_the_middle_of_anything_ends(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    """The finalizer of one runs in a thread that opens, or writes to, the same directory."""
    real = getattr(Environment, method)
    count = 20 if long else 3
    dropped: list[weakref.ref[Cycle]] = []

    def collected(*arguments: object, **options: object) -> object:
        gc.collect()
        result = real(*arguments, **options)
        gc.collect()
        return result

    gc.disable()
    gc.freeze()  # objects of other tests are not looked at each time; all dropped objects are new
    try:
        kept = open_engine(tmp_path, backend="lmdb", max_size=CAP)
        for number in range(count):
            assert kept.put(key(number), sealed(number, 1, 2000))

        def drop() -> None:
            other = open_engine(tmp_path, backend="lmdb", max_size=CAP)
            for number in range(count):
                assert other.get(key(number))  # uses, to be written at the end
            dropped.append(weakref.ref(Cycle(other)))

        monkeypatch.setattr(Environment, method, collected)
        threads = []
        for _ in range(4 if long else 2):
            drop()
            together = threading.Barrier(3)

            def use(together: threading.Barrier = together) -> None:
                together.wait()
                for number in range(count):
                    kept.put(key(number), sealed(number, 2, 2000))
                    kept.get(key(number))

            threads = [threading.Thread(target=use, daemon=True) for _ in range(2)]
            for thread in threads:
                thread.start()
            together.wait()
            shutil.rmtree(tmp_path / "lmdb", ignore_errors=True)
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive(), "it waits for ever"
            for number in range(count):  # those beside the removal may have failed
                assert kept.put(key(number), sealed(number, 3, 2000))
            assert dropped[-1]() is None
        monkeypatch.undo()
        kept.close()
    finally:
        gc.unfreeze()
        gc.enable()
        gc.collect()


def test_the_uses_of_a_dropped_cache_are_written_by_who_goes_on(tmp_path: Path) -> None:
    now = iter(range(10**18, 10**18 + 10**6))
    with closing(LmdbBackend(tmp_path, clock=lambda: next(now))) as kept:
        for number in range(5):
            kept.put(key(number), b"x")
        other = LmdbBackend(tmp_path, clock=lambda: next(now))
        assert other.use(key(0)) == b"x"
        with kept.batch():
            other.close()  # as the garbage collector would, in the middle of a transaction
            kept.delete(key(4))
        kept.put(key(5), b"x")
        assert [info.key for info in kept.coldest()] == [key(n) for n in (1, 2, 3, 0, 5)]
        with suppress(BackendError):
            other.get(key(0))
