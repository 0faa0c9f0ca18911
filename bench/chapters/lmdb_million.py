"""The chapter about LMDB among a million entries: what each operation costs there."""

import os
import random
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path

from contenders.contenders import BY_NAME
from contenders.population import Population, key
from contenders.puts_at_cap import UNUSED, Putting
from harness.findings import Absent, Comparison, Point
from harness.measure import Round, interleave, per_item
from harness.plan import KIB, Found, Plan

from kcache import CacheEngine

CHAPTER = "million"
OURS = "kcache `lmdb`"
FEW = 1_000
GETS = 500
#: The share of a population's youngest entries that is read. The read entries are evicted last, and
#: the others are more than a round evicts.
LIVING = 0.5
#: For each column of the rounds: the chart's title, and the target for the ratio of the largest to
#: the smallest.
OPERATIONS = {
    "put": ("put of 1 KiB at the cap", 2.0),
    "get": ("get of 1 KiB", None),
    "coldest": ("first of `coldest`, 1 KiB", None),
    "open": ("opening, 1 KiB", 1.5),
}


def million(plan: Plan, folder: Path) -> Found:
    """LMDB with entries of 1 KiB, from a thousand up to a million."""
    if not plan.million:
        yield Absent(CHAPTER, "LMDB among 1,000,000 entries", "only the full run fills it")
        return
    counts = [count for count in (FEW, 10_000, 100_000) if count < plan.million]
    counts.append(plan.million)
    contender = BY_NAME[OURS]
    fill = Population.fill
    populations = [fill(contender, folder / str(count), count, KIB) for count in (0, *counts)]
    os.sync()
    putting = [Putting(population, UNUSED) for population in populations[1:]]
    for each in putting:
        each.settle()
    tasks = [_opening(population) for population in populations]
    tasks += [task for each in putting for task in _operations(each)]
    rounds = interleave(plan.fills, tasks)
    for each in putting:
        each.opened.close()
    for operation, (title, _) in OPERATIONS.items():
        for count in counts:
            chart = f"{title}, against entries"
            summary = rounds.summary(f"{operation} {count}")
            yield Point(CHAPTER, chart, OURS, "ours", count, "entries", "s", summary)
    ratio = Comparison(CHAPTER, rounds).ratio
    for operation, (title, target) in OPERATIONS.items():
        few = 0 if operation == "open" else FEW
        yield ratio(
            f"{OURS}, {title}, among {plan.million:,} entries",
            f"{operation} {plan.million}",
            f"among {few:,}" if few else "an empty one",
            f"{operation} {few}",
            target=target,
        )


def _opening(population: Population) -> Callable[[], Round]:
    def task() -> Round:
        start = time.perf_counter()
        opened = population.open()
        opened.used()
        seconds = time.perf_counter() - start
        opened.close()
        return {f"open {population.count}": seconds}

    return task


def _operations(each: Putting) -> Iterator[Callable[[], Round]]:
    count, engine = each.population.count, _engine(each)
    choice = random.Random(count)

    def get() -> Round:
        new = each.next - UNUSED
        young = chain(range(each.next - 1, UNUSED - 1, -1), range(count - 1, new, -1))
        living = list(islice(young, int(LIVING * count)))
        keys = [key(number) for number in choice.sample(living, GETS)]
        before = engine.stats().misses
        found = per_item(f"get {count}", each.opened.get, keys)()
        if engine.stats().misses > before:
            raise RuntimeError("not a hit")
        return found

    def coldest() -> Round:
        next(engine.backend.coldest())  # writes the noted uses, outside the timed part
        start = time.perf_counter()
        first = next(engine.backend.coldest(), None)
        seconds = time.perf_counter() - start
        if first is None:
            raise RuntimeError("no entries")
        return {f"coldest {count}": seconds}

    yield each.task(f"put {count}")
    yield get
    yield coldest


def _engine(each: Putting) -> CacheEngine:
    if each.opened.engine is None:
        raise RuntimeError(f"{each.population.name} has no engine")
    return each.opened.engine
