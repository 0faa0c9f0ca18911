"""Waits that would never end, for leaders that hang."""

import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from core.helpers import key, python, together

from kcache import open_engine
from kcache.engine.single_flight import Flight, lock_key
from kcache.engine.stats import Counters

LONG = 120.0
A = key("a")


@pytest.fixture(autouse=True)
def _alarm() -> Iterator[None]:
    """A test that waits for ever is ended."""
    signal.alarm(100)
    yield
    signal.alarm(0)


@contextmanager
def hanging(flight: Flight) -> Iterator[None]:
    """A leader that begins, and does not end before the block does."""
    begun, go = threading.Event(), threading.Event()

    def make() -> tuple[str, str]:
        begun.set()
        assert go.wait(LONG)
        return "late", "late"

    thread = threading.Thread(target=lambda: flight.run(A, lambda: None, make, str))
    thread.start()
    assert begun.wait(LONG)
    yield
    go.set()
    thread.join(LONG)


class Maker:
    """Makes a value slowly; the first time, it may hang until the value is made again."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.made = self.at_once = self.most = 0
        self._hangs, self._there, self._guard = hangs, threading.Event(), threading.Lock()

    def make(self) -> tuple[str, str]:
        with self._guard:
            self.made, self.at_once = self.made + 1, self.at_once + 1
            self.most = max(self.most, self.at_once)
            hangs = self._hangs and self.made == 1
        assert self._there.wait(LONG if hangs else 0.1) is hangs
        with self._guard:
            self.at_once -= 1
        self._there.set()
        return "made", "made"

    def look(self) -> str | None:
        return "made" if self._there.is_set() else None

    def all_get_it(self, flight: Flight, count: int) -> None:
        got = together(count, lambda: flight.run(A, self.look, self.make, str))
        assert got == ["made"] * count


@pytest.mark.parametrize("leader", ["a thread", "a thread with a lock", "another process"])
def test_of_many_threads_that_lose_patience_one_makes_the_value(
    leader: str, tmp_path: Path
) -> None:
    """All 24 compiled at once."""
    path = None if leader == "a thread" else str(tmp_path / "flight")
    flight, maker = Flight(path, wait=0.3, counters=Counters()), Maker()
    with closing(lock_key(path, A)) if leader == "another process" else hanging(flight):
        maker.all_get_it(flight, 24)
    assert (maker.made, maker.most) == (1, 1)


def test_a_successor_that_hangs_too_is_replaced_in_turn() -> None:
    flight, maker = Flight(None, wait=0.2, counters=Counters()), Maker(hangs=True)
    with hanging(flight):
        maker.all_get_it(flight, 6)
    assert maker.made == 2


IMPATIENT = """
import os, sys, time
from kcache import CacheEngine, Entry
from kcache.backend import open_backend
place, mine = sys.argv[1:]
backend = open_backend("file", place, max_size=10**6)
engine = CacheEngine(backend, max_size=10**6, lock_file=place + "/flight", wait=1.0)
def create():
    with open(place + "/made", "ab", buffering=0) as file:
        file.write(b".")
    time.sleep(0.3)
    return Entry({"a": b"made"})
assert engine.get_or_create(mine, create) == Entry({"a": b"made"})
engine.close()
"""


def test_of_many_processes_that_lose_patience_one_makes_the_value(tmp_path: Path) -> None:
    place = tmp_path / "cache"
    with open_engine(place) as engine:
        flight = Flight(str(place / "flight"), wait=LONG, counters=engine.counters)
        with hanging(flight):
            assert together(4, lambda: python(IMPATIENT, str(place), A).returncode) == [0] * 4
        assert (place / "made").read_bytes() == b"."
