"""LMDB on a disk that its own entries fill: the coldest make room, and everything is stored."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from core.helpers import key
from faults.places import disk_usage, is_whole, sealed

from kcache import open_engine

CAP = 64 << 20


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [3000, 60_000, 1_500_000])
def test_the_coldest_make_room_where_the_disk_is_smaller_than_the_cap(
    size: int, disk: Path, long: bool
) -> None:
    count = (12 << 20) // max(size, 4096) * (8 if long else 2)
    with open_engine(disk / "cache", backend="lmdb", max_size=CAP) as engine:
        failed = [n for n in range(count) if not engine.put(key(n), sealed(n, 1, size))]
        # Entries of less than a page lie in pages with others: it takes longer to free one.
        assert len(failed) <= (count // 100 if size < 4096 else 0), failed
        held = [number for number in range(count) if engine.get(key(number)) is not None]
        assert held == [n for n in range(held[0], count) if n not in failed], "not the coldest went"
        assert len(held) * max(size, 4096) > 8 << 20, "too many went"
        for number in held[::10]:
            found = engine.get(key(number))
            assert found is not None
            assert is_whole(number, found)
        # The statistics have no room, either.
        assert engine.stats().errors <= len(failed) + 1
        assert disk_usage(disk) <= 16 << 20
        assert list(engine.backend.check()) == []


def test_the_cache_grows_again_once_others_have_made_room(disk: Path) -> None:
    ballast = disk / "ballast"
    ballast.write_bytes(os.urandom(8 << 20))
    with open_engine(disk / "cache", backend="lmdb", max_size=CAP) as engine:
        for number in range(1500):
            assert engine.put(key(number), sealed(number, 1, 12_000))
        before = engine.entry_count
        ballast.unlink()
        for number in range(1500, 4000):
            assert engine.put(key(number), sealed(number, 1, 12_000))
        assert engine.entry_count > 1.5 * before
