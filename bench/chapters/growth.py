"""The chapter about growth: what a put at the cap and opening cost among more entries."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from contenders.contenders import CONTENDERS, FILE_STREAM, OURS, PLAIN, Contender, available
from contenders.population import Population, remove
from contenders.puts_at_cap import Putting
from harness.findings import Absent, Comparison, Point
from harness.measure import Round, Rounds, interleave
from harness.plan import KIB, Found, Plan

CHAPTER = "growth"
PAYLOAD = 4 * KIB
PUT = f"put of {PAYLOAD // KIB} KiB at the cap"
#: The population that the targets compare the largest one with, and the one at which they name
#: cuda.core.
FEW, BESIDE_PEER = 1_000, 10_000
#: If a put takes longer than this many seconds, it is tried once and not measured.
TOO_LONG = 3.0
#: How often a round opens a cache, unless this many seconds allow fewer times.
OPENINGS, OPENING_SECONDS = 20, 0.2


def growth(plan: Plan, folder: Path) -> Found:
    """Populations of every cache, from a hundred entries on, each at its cap."""
    contenders, absent = available(CHAPTER, CONTENDERS)
    yield from absent
    filled = {
        each.name: [
            Population.fill(each, folder / each.name / str(count), count, PAYLOAD)
            for count in ((0,) if each.role == OURS else ()) + plan.counts
        ]
        for each in contenders
    }
    os.sync()  # so that the measurement has no later writes in it
    yield from _opening(plan, contenders, filled)
    yield from _puts(plan, contenders, filled)
    remove(population for each in filled.values() for population in each)


# -- puts ----------------------------------------------------------------------------------------


def _puts(plan: Plan, contenders: list[Contender], filled: dict[str, list[Population]]) -> Found:
    tasks: list[Callable[[], Round]] = []
    opened: list[Putting] = []
    for each in contenders:
        for population in filled[each.name]:
            if not population.count:
                continue
            putting = Putting(population)
            too_slow = _settle(putting)
            if too_slow is not None:
                yield too_slow
                break
            opened.append(putting)
            tasks.append(putting.task(f"{each.name} {population.count}"))
    rounds = interleave(plan.fills, tasks)
    for putting in opened:
        putting.opened.close()
    measured = {(p.population.name, p.population.count) for p in opened}
    yield from _points(f"{PUT} against entries", contenders, rounds, measured)
    yield from _put_ratios(plan, contenders, rounds, measured)


def _settle(putting: Putting) -> Absent | None:
    """Settles it, or says why not."""
    putting.try_one()
    population = putting.population
    if putting.seconds <= TOO_LONG:
        putting.settle()
        return None
    who = f"{population.name}, put among {population.count:,} entries and more"
    return Absent(CHAPTER, who, f"one put took {putting.seconds:.1f} s")


def _put_ratios(
    plan: Plan, contenders: list[Contender], rounds: Rounds, measured: set[tuple[str, int]]
) -> Found:
    many = plan.counts[-1]
    ratio = Comparison(CHAPTER, rounds).ratio
    for each in contenders:
        among = f"{each.name}, {PUT} among"
        if (each.name, many) in measured:
            yield ratio(
                f"{among} {many:,} entries",
                f"{each.name} {many}",
                f"among {FEW:,}",
                f"{each.name} {FEW}",
                target=2.0 if each.backend == "lmdb" else None,
            )
    for each, other in _pairs(contenders):
        if (other.name, BESIDE_PEER) in measured:
            promised = each.backend == "lmdb" and other.name == FILE_STREAM
            yield ratio(
                f"{each.name}, {PUT} among {BESIDE_PEER:,} entries",
                f"{each.name} {BESIDE_PEER}",
                other.name,
                f"{other.name} {BESIDE_PEER}",
                target=100.0 if promised else None,
                at_least=True,
            )


def _pairs(contenders: Iterable[Contender]) -> Iterator[tuple[Contender, Contender]]:
    """Ours, each with each peer that keeps its values on the disk, as ours do."""
    on_disk = [each for each in contenders if each.on_disk]
    for each in on_disk:
        if each.backend in PLAIN:
            yield from ((each, other) for other in on_disk if other.role != OURS)


def _points(
    chart: str, contenders: list[Contender], rounds: Rounds, measured: set[tuple[str, int]]
) -> Found:
    roles = {each.name: each.role for each in contenders}
    for name, count in sorted(measured, key=lambda pair: (list(roles).index(pair[0]), pair[1])):
        summary = rounds.summary(f"{name} {count}")
        yield Point(CHAPTER, chart, name, roles[name], count, "entries", "s", summary)


# -- opening -------------------------------------------------------------------------------------


def _opening(plan: Plan, contenders: list[Contender], filled: dict[str, list[Population]]) -> Found:
    """Opening at the cap, and asking what is held where that can be asked."""
    on_disk = [each for each in contenders if each.on_disk]
    populations = [population for each in on_disk for population in filled[each.name]]
    tasks = [partial(_open, population) for population in populations]
    interleave(1, tasks)
    rounds = interleave(plan.fills, tasks)
    measured = {(each.name, each.count) for each in populations if each.count}
    yield from _points("opening against entries", contenders, rounds, measured)
    ratio = Comparison(CHAPTER, rounds).ratio
    many = plan.counts[-1]
    opening = f"open and ask for usage, {many:,} entries of {PAYLOAD // KIB} KiB"
    for each in on_disk:
        if each.role == OURS:
            yield ratio(
                f"{each.name}, {opening}",
                f"{each.name} {many}",
                "an empty one",
                f"{each.name} 0",
                target=1.5,
            )
    for each, other in _pairs(on_disk):
        name, other_name = f"{each.name} {many}", f"{other.name} {many}"
        yield ratio(f"{each.name}, {opening}", name, other.name, other_name, at_least=True)


def _open(population: Population) -> Round:
    """The seconds of opening; closing is not part of it."""
    seconds, count = 0.0, 0
    while count < OPENINGS and seconds < OPENING_SECONDS:
        start = time.perf_counter()
        opened = population.open()
        held = opened.used()
        seconds += time.perf_counter() - start
        count += 1
        opened.close()
        if held is not None and held > population.cap:
            raise RuntimeError(f"{population.name}: {held} bytes in use")
    return {f"{population.name} {population.count}": seconds / count}
