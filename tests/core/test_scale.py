"""Scale: what grows with the number of entries, and what must not; counts, never times."""

from __future__ import annotations

import gc
import itertools
import shutil
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from contenders.population import fill_ours
from core.helpers import entry, key, output_of
from harness.stat_counter import Looks

import kcache
from kcache.engine.eviction import EVICT_BATCH
from kcache_backends.lmdb import MAX_TOUCHED

#: How many files a put at the cap may look at: on average, and in the worst case.
MEAN, MOST = 10, 4096
#: Eight trims, some of which take a new sample of the coldest. (A put that finds no room evicts as
#: much as the next `EVICT_BATCH` puts need.)
PUTS = 8 * (EVICT_BATCH + 1)
FEW = 1_000

BACKENDS = ("file", "zstd+lmdb")


@dataclass
class Population:
    """A cache that is full, of `count` entries of 64 bytes."""

    backend: str
    directory: Path
    count: int

    def __post_init__(self) -> None:
        self.cap = max(fill_ours(self.backend, self.directory, self.count, 64), 1024)

    def open(self) -> kcache.CacheEngine:
        return kcache.open_engine(self.directory, backend=self.backend, max_size=self.cap)


SIZES = (20_000, pytest.param(120_000, marks=[pytest.mark.long, pytest.mark.timeout(600)]))


@pytest.fixture(scope="module", params=SIZES)
def crowded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Population]:
    """A file cache that is full, of 20,000 entries or more of 64 bytes."""
    place = tmp_path_factory.mktemp("crowded")
    yield Population("file", place, request.param)
    shutil.rmtree(place)  # pytest would keep those of the last three runs


def test_a_put_at_the_cap_looks_at_few_files(crowded: Population) -> None:
    new = (key(f"new {number}") for number in itertools.count())
    counts = []
    with crowded.open() as engine:
        for name in itertools.islice(new, PUTS):
            with Looks() as looks:
                assert engine.put(name, entry(64))
            counts.append(looks.count)
        assert engine.stats().evictions >= PUTS - 2 * EVICT_BATCH  # it stayed full
        assert engine.size_bytes <= crowded.cap
    assert 0 < sum(counts) / len(counts) <= MEAN
    assert max(counts) <= MOST


# -- LMDB: transactions ----------------------------------------------------------------------------

LAST_TRANSACTION = """
import sys, lmdb
with lmdb.open(sys.argv[1], readonly=True) as env:
    print(env.info()["last_txnid"])
"""


def last_transaction(place: Path) -> int:
    """Asks another process, since LMDB must not open a database twice in one."""
    return int(output_of(LAST_TRANSACTION, place / "lmdb" / "db"))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Population:
    """An LMDB cache that is full, of 5,000 entries of 64 bytes."""
    return Population("lmdb", tmp_path_factory.mktemp("full"), 5_000)


def test_a_put_at_the_cap_is_one_transaction(full: Population) -> None:
    with full.open() as engine:
        before = last_transaction(full.directory)
        for number in range(EVICT_BATCH + 10):  # two of them evict
            assert engine.put(key(f"put {number}"), entry(64))
        assert engine.stats().evictions > EVICT_BATCH
        assert last_transaction(full.directory) == before + EVICT_BATCH + 10


def test_gets_write_nothing_until_many_keys_were_used(full: Population) -> None:
    with full.open() as engine:
        names = [info.key for info in itertools.islice(engine.backend.scan(), MAX_TOUCHED)]
        assert len(names) == MAX_TOUCHED
        before = last_transaction(full.directory)
        for name in names[1:] * 3:
            assert engine.get(name) is not None
        assert last_transaction(full.directory) == before
        assert engine.get(names[0]) is not None
        assert last_transaction(full.directory) == before + 1


# -- memory ----------------------------------------------------------------------------------------


def _held(population: Population) -> int:
    """Returns the bytes that Python holds more, at most, from before opening until usage is known.

    Opened twice before, so that what a process allocates once is there already.
    """
    for _ in range(2):
        with population.open() as engine:
            assert engine.entry_count > 0
    gc.collect()
    tracemalloc.start()
    try:
        with population.open() as engine:
            assert engine.entry_count > 0
            return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_open_engine_takes_no_memory_per_entry(backend: str, tmp_path: Path) -> None:
    few, many = (Population(backend, tmp_path / str(count), count) for count in (10, FEW))
    # The least of some: threads that earlier tests have left allocate, too.
    held = [min(_held(population) for _ in range(2)) for population in (few, many)]
    # A key alone takes more than a hundred bytes.
    assert held[1] - held[0] < 10 * FEW
