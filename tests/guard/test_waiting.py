"""Waiting: how often a process that waits looks at the lock, and at the cache, as time passes."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from guard.operations import key

from kcache.engine import single_flight
from kcache.engine.single_flight import Flight, KeyLocks
from kcache.engine.stats import Counters

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere a library's locks are looked at"
)

NAME = key("waited for")
#: Pauses within the first half second, in which they get longer, and in each second after it.
EARLY, LATER = 90, 40


class Clock:
    """Time that passes only in pauses, in place of the module `time`."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    times = SimpleNamespace(monotonic=made.monotonic, sleep=made.sleep)
    monkeypatch.setattr(single_flight, "time", times)
    return made


@pytest.mark.parametrize("seconds", [0.5, 5, 60])
def test_a_waiter_looks_seldom(seconds: float, clock: Clock, tmp_path: Path) -> None:
    seen: Counter[str] = Counter()

    def look() -> str | None:
        seen["looks"] += 1
        return None

    def make() -> tuple[str, str]:
        return "made alone", "made alone"

    path = str(tmp_path / "flight")
    other = KeyLocks(path).acquire(NAME)  # opened on its own, so it excludes the flight's
    assert other is not None
    counters = Counters()
    waits = Flight(path, wait=seconds, counters=counters)
    assert waits.run(NAME, look, make, str) == "made alone"
    assert counters.snapshot().wait_timeouts == 1
    assert seconds <= sum(clock.pauses) < seconds + 0.05
    assert len(clock.pauses) <= EARLY + LATER * seconds
    assert max(clock.pauses) <= 0.025  # otherwise a waiting process gets the kernel that much later
    assert seen["looks"] <= seconds + 2  # the cache: once per second, and at the end
    other.close()
