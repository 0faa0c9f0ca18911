"""Puts at the cap: put into a full cache what it does not hold yet."""

import os
import time
from collections.abc import Callable

from harness.measure import Round, per_item

from contenders.contenders import OURS
from contenders.population import Population, key, value
from kcache.engine.eviction import EVICT_BATCH

#: The number of kcache's puts at the cap in one round. It is a multiple of the puts between two
#: trims, so that every round has as many trims: a put that finds no room evicts as much as the next
#: `EVICT_BATCH` puts need.
PUTS = 4 * (EVICT_BATCH + 1)
#: How many seconds a round of a peer's puts takes, up to a limit of their number: some peers look
#: at all entries in each put.
PEER_SECONDS, PEER_PUTS = 0.25, 130
#: The first number that no initial entry of a population has.
UNUSED = 10_000_000


class Putting:
    """A cache at its cap.

    Attributes:
        opened: the cache.
        seconds: what one put took when it was tried first.
    """

    def __init__(self, population: Population) -> None:
        self.population = population
        self.opened = population.open()
        #: The number of the next new entry.
        self.next = UNUSED
        self.seconds = 0.0

    @property
    def puts(self) -> int:
        """How many puts a round has."""
        if self.population.contender.role == OURS:
            return PUTS
        return min(max(int(PEER_SECONDS / self.seconds), 1), PEER_PUTS)

    def new(self, count: int) -> list[tuple[str, bytes]]:
        """Returns keys that were never put, with values that take turns."""
        first, self.next = self.next, self.next + count
        values = [value(number, self.population.payload) for number in range(min(count, 16))]
        return [(key(first + n), values[n % len(values)]) for n in range(count)]

    def put(self, new: tuple[str, bytes]) -> None:
        if self.opened.put(*new) is False:
            raise RuntimeError(f"{self.population.name}: not stored")

    def settle(self) -> None:
        """Brings it to what it is like in the long run, unmeasured.

        Raises RuntimeError if nothing was evicted: by kcache's own count (which entry of many it is
        depends on a sample), from a peer the entry that was used first.
        """
        self.try_one()
        for new in self.new(self.puts):
            self.put(new)
        engine = self.opened.engine
        if engine.stats().evictions == 0 if engine else self.opened.get(key(0)) is not None:
            raise RuntimeError(f"{self.population.name}: nothing was evicted")

    def try_one(self) -> None:
        """Puts one entry to find out how long it takes."""
        start = time.perf_counter()
        self.put(*self.new(1))
        self.seconds = time.perf_counter() - start

    def task(self, name: str) -> Callable[[], Round]:
        """Returns a task that reports the seconds of one put, as the mean of a round.

        What it evicts is on disk, as what was put long ago is: to remove a file that never got
        there is cheaper, and a small population would consist of those.
        """

        def task() -> Round:
            new = self.new(self.puts)
            os.sync()
            return per_item(name, self.put, new)()

        return task
