"""Populations: filled by hand, they are what the cache itself would have made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from contenders.contenders import BY_NAME, CONTENDERS
from contenders.population import Population, key, value
from harness.plan import KIB

COUNT, PAYLOAD = 300, 4 * KIB


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sync", lambda: None)  # waits for whatever else this machine writes


@pytest.fixture(params=[each.name for each in CONTENDERS])
def population(request: pytest.FixtureRequest, tmp_path: Path) -> Population:
    contender = BY_NAME[request.param]
    why = contender.missing()
    if why is not None:
        pytest.skip(why)
    return Population.fill(contender, tmp_path / "it", COUNT, PAYLOAD)


def readable(population: Population) -> bool:
    """A wrapper's population holds what it did not compress."""
    return "zstd" not in population.name


def test_every_entry_is_there(population: Population) -> None:
    opened = population.open()
    if readable(population):
        assert [opened.get(key(number)) for number in range(COUNT)] == [
            value(number, PAYLOAD) for number in range(COUNT)
        ]
    used = opened.used()
    assert used is None or used == population.cap
    if opened.engine is not None:
        assert opened.engine.entry_count == COUNT
    opened.close()


def test_it_is_at_its_cap_and_the_first_go_first(population: Population) -> None:
    opened = population.open()
    opened.put(key(COUNT), value(COUNT, PAYLOAD))
    if opened.engine is not None:
        gone = opened.engine.stats().evictions
        assert COUNT > opened.engine.entry_count == COUNT + 1 - gone
    else:
        there = [opened.get(key(number)) is not None for number in range(COUNT + 1)]
        gone = there.index(True)
        assert 1 <= gone <= 10
        assert all(there[gone:])
    opened.close()
