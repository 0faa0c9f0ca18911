"""SIGKILLs over processes that put, get, delete, evict, clear and reopen: nothing is lost by them."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.places import NAMES
from faults.storm import Storm


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_a_storm_of_kills_leaves_a_sound_cache(name: str, long: bool, tmp_path: Path) -> None:
    kills = 1000 if long else 16
    report = Storm(tmp_path / "cache", name, processes=6 if long else 3).run(kills)
    assert report.problems == []
    assert report.kills >= kills
    assert report.counts["h"] > 0
    assert report.void_looks < report.looks / 4
