"""Many processes and threads: one cap, stopped lock holders, many readers, and different caps."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from core.helpers import fork, key, together, wait
from faults.places import (
    NAMES,
    agrees,
    disk_bound,
    disk_usage,
    has,
    held_locks,
    is_lmdb,
    leftovers,
    put_all,
    sealed,
    stopped,
    truth,
)

from kcache import open_engine
from kcache_backends import _lmdb_environment, file
from kcache_backends._shards import PATIENCE

_SMALL = 1_500_000
ALL = pytest.mark.parametrize("name", NAMES)


def in_children(*works: Callable[[], object]) -> None:
    assert [wait(pid) for pid in [fork(work) for work in works]] == [0] * len(works)


# -- one cap ---------------------------------------------------------------------------------------

ONE_CAP = 10_000_000
WRITERS = 8
LARGEST = 300_000


@ALL
@pytest.mark.timeout(600)
def test_eight_processes_keep_one_cap(name: str, long: bool, tmp_path: Path) -> None:
    """Eight writers keep the cap, even though one is killed and replaced again and again."""
    place = tmp_path / "cache"
    kills = 400 if long else 6
    rounds = 2_000 if long else 20
    numbers = 250  # about 20 MB of mixed sizes, more of them small
    largest = LARGEST + 1024
    told = tmp_path / "told"

    def work(seed: int) -> None:
        signal.alarm(500)
        random = Random(seed)
        with open_engine(place, backend=name, max_size=ONE_CAP) as engine:
            for _ in range(rounds):
                number = min(int(random.expovariate(4 / numbers)), numbers - 1)
                if not has(engine, number):
                    size = int(1000 * LARGEST ** (random.random()) / 1000 ** random.random())
                    size = min(LARGEST, max(1000, size * 8))
                    engine.put(key(number), sealed(number, seed, size))
                engine.put(key(f"{seed} {_}"), sealed(_, seed, random.randrange(50_000, LARGEST)))
            stats = engine.stats()
            assert stats.corrupt == 0
            with told.open("a") as file:
                file.write(f"{stats.hits} {stats.evictions} {stats.errors}\n")

    with open_engine(place, backend=name, max_size=ONE_CAP):
        pass
    samples = 0
    children = {fork(lambda seed=seed: work(seed)) for seed in range(WRITERS)}
    while children:
        entries = 0 if is_lmdb(name) else sum(len(files) for _, _, files in os.walk(place))
        bound = disk_bound(name, ONE_CAP, writers=WRITERS, largest=largest, entries=entries)
        assert disk_usage(place) <= bound
        samples += 1
        if kills and samples % 2 == 0:
            kills -= 1
            victim = children.pop()
            os.kill(victim, signal.SIGKILL)
            assert wait(victim) in (0, -signal.SIGKILL)  # it may have ended before the kill
            children.add(fork(lambda seed=WRITERS + kills: work(seed)))
        for child in list(children):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                assert status == 0
                children.remove(child)
    rows = [map(int, line.split()) for line in told.read_text().splitlines()]
    hits, evictions, errors = map(sum, zip(*rows, strict=True))
    assert samples > 3  # on a loaded machine, there are few samples
    assert hits > 0
    assert evictions > 0
    assert errors <= WRITERS
    held = sum(truth(place, name).values())
    writers = 0 if is_lmdb(name) else WRITERS
    assert ONE_CAP / 2 < held <= (ONE_CAP + writers * largest) * 1.02
    assert held_locks(place, name) == 0
    with open_engine(place, backend=name, max_size=ONE_CAP) as engine:
        list(engine.backend.check(repair=True))
        assert list(engine.backend.check()) == []
        agrees(engine, place, name)
        assert leftovers(place, name) == []


# -- stopped processes -----------------------------------------------------------------------------


@ALL
def test_a_stopped_lock_holder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lmdb_environment, "PATIENCE", 0.3)
    monkeypatch.setattr(file, "PATIENCE", 0.3)

    def hold(stop: Callable[[], None]) -> None:
        """Stop the process while it holds a lock that a put of key(1) needs."""
        engine = open_engine(tmp_path, backend=name)
        if is_lmdb(name):
            with engine.backend.batch():
                stop()
        else:
            real = os.utime

            def stopping(*args: object, **times: object) -> None:
                os.utime = real
                stop()

            os.utime = stopping  # type: ignore[assignment]
            engine.put(key(1), sealed(1, 1, 1000))

    with open_engine(tmp_path, backend=name) as engine:
        assert engine.put(key(1), sealed(1, 1, 1000))
        with stopped(hold):
            assert not engine.put(key(1), sealed(1, 2, 1000))
            found = engine.get(key(1))
            assert found.metadata["version"] == 1
            assert engine.stats().errors == 1
        assert engine.put(key(1), sealed(1, 3, 1000))
        assert engine.get(key(1)) == sealed(1, 3, 1000)
        with stopped(hold, signal.SIGKILL):
            pass
        assert engine.put(key(1), sealed(1, 4, 1000))


def test_a_process_that_was_stopped_in_a_put_stops_no_eviction(tmp_path: Path) -> None:
    """Once the cache was full, such a process once made all puts of all processes fail."""

    def hold(stop: Callable[[], None]) -> None:
        real = os.replace

        def stopping(*args: str) -> None:
            stop()
            real(*args)

        os.replace = stopping  # type: ignore[assignment]
        with open_engine(tmp_path, max_size=_SMALL) as engine:
            engine.put(key(0), sealed(0, 2, 6000))

    with open_engine(tmp_path, max_size=_SMALL) as engine:
        put_all(engine, range(400), 1, 6000)  # the coldest are partly in the locked shard
        with stopped(hold):
            locked = key(0)[:2]
            begun = time.monotonic()
            for number in range(1000, 1400):
                if key(number)[:2] != locked:
                    assert engine.put(key(number), sealed(number, 1, 6000))
                    assert engine.size_bytes <= _SMALL
            assert time.monotonic() - begun < PATIENCE  # no put has waited
            assert engine.stats().errors == 0
        put_all(engine, range(2000, 2400), 1, 6000)
        assert engine.size_bytes <= _SMALL
        assert list(engine.backend.check()) == []


# -- readers ---------------------------------------------------------------------------------------


def test_more_readers_than_lmdb_knows_of_by_itself(long: bool, tmp_path: Path) -> None:
    """By default, LMDB has places for 126 readers; each thread of each process takes one."""
    processes, threads = (16, 64) if long else (5, 30)
    with open_engine(tmp_path, backend="lmdb") as engine:
        put_all(engine, range(20), 1, 10_000)

    def work() -> None:
        with open_engine(tmp_path, backend="lmdb") as engine:

            def read() -> None:
                iterators = [engine.backend.scan(), engine.backend.coldest()]
                for number in range(20):
                    assert has(engine, number)
                    for iterator in iterators:
                        next(iterator)

            assert together(threads, read) == [None] * threads
            assert engine.stats().errors == 0

    in_children(*[work] * processes)


# -- two caps --------------------------------------------------------------------------------------


@ALL
def test_two_processes_with_different_caps_share_a_cache(name: str, tmp_path: Path) -> None:
    small, large = 300_000, 6_000_000

    def fill_it() -> None:
        with open_engine(tmp_path, backend=name, max_size=large) as engine:
            put_all(engine, range(100), 1, 40_000)
            assert all(has(engine, number) for number in range(100))

    with open_engine(tmp_path, backend=name, max_size=small) as engine:
        assert engine.put(key("before"), sealed(0, 1, 1000))
        in_children(fill_it)
        held = 4_000_000 if "zstd" not in name else 2_000_000
        assert engine.size_bytes > held
        for number in range(90, 100):
            assert engine.get(key(number)) == sealed(number, 1, 40_000)
        # The next puts bring the size below the small cap, with a batch of evictions each.
        for number in range(20):
            engine.put(key(f"after {number}"), sealed(number, 1, 1000))
        assert engine.put(key("last"), sealed(0, 1, 1000))
        assert engine.size_bytes <= small
        assert engine.get(key("last"))
        assert engine.stats().errors == 0
