"""Scale: the number of operations that may grow with the number of entries, and that must not."""

import itertools
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from core.helpers import entry, key

import kcache
from kcache.engine.eviction import EVICT_BATCH

#: How many files a put in a full cache may look at: on average, and in the worst case.
MEAN, MOST = 10, 4096
#: Enough puts for sixteen evictions, some of which sample the coldest entries again. (A put that
#: finds no room evicts as much as the next `EVICT_BATCH` puts need.)
PUTS = 16 * (EVICT_BATCH + 1)


SIZES = (5_000, pytest.param(120_000, marks=[pytest.mark.long, pytest.mark.timeout(600)]))


@contextmanager
def looks() -> Iterator[list[str]]:
    """Yield a list that gets the name of each call of `stat` or `lstat` in the block."""
    found: list[str] = []

    def note(_: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ in ("stat", "lstat"):
            found.append(called.__name__)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("count", SIZES)
def test_a_put_at_the_cap_looks_at_few_files(count: int, tmp_path: Path) -> None:
    """A put into a cache that is full of small entries looks at few of their files."""
    with kcache.open_engine(tmp_path, max_size=count << 13) as engine:
        for number in range(count):
            engine.put(key(f"old {number}"), entry(64))
        cap = engine.size_bytes
    new = (key(f"new {number}") for number in itertools.count())
    counts = []
    with kcache.open_engine(tmp_path, max_size=cap) as engine:
        for name in itertools.islice(new, PUTS):
            with looks() as found:
                assert engine.put(name, entry(64))
            counts.append(len(found))
        assert engine.stats().evictions >= PUTS - 2 * EVICT_BATCH  # the cache stayed full
        assert engine.size_bytes <= cap
    assert 0 < sum(counts) / len(counts) <= MEAN
    assert max(counts) <= MOST
    shutil.rmtree(tmp_path)  # pytest would keep the directories of the last three runs
