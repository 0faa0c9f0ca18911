"""The chapter about processes: how many gets or puts several of them manage together."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from contenders.contenders import BY_NAME, ON_DISK, OURS, PLAIN, ROOMY, Contender, available
from contenders.population import Population, key, value
from harness.findings import Absent, Point, Ratio
from harness.measure import Round, Rounds, interleave
from harness.plan import KIB, Found, Plan
from harness.worker_processes import Workers

CHAPTER = "crowd"
COUNT = 1_000
PAYLOAD = 4 * KIB
KINDS = ("get", "put")


@dataclass(slots=True)
class Tally:
    """Operations that were tried, and how many of them failed in which way."""

    tried: int = 0
    failed: Counter[str] = field(default_factory=Counter[str])


def crowd(plan: Plan, folder: Path) -> Found:
    """Readers of one cache, and writers to another at its cap."""
    contenders, absent = available(CHAPTER, ON_DISK)
    yield from absent
    tallies = {each.name: Tally() for each in contenders}
    with ExitStack() as stack:
        tasks: list[Callable[[], Round]] = []
        for each in contenders:
            arguments = (each.name, *_prepared(each, folder / each.name))
            workers = stack.enter_context(
                Workers("chapters.many_processes", max(plan.crowds), arguments)
            )
            for kind in KINDS:
                for size in plan.crowds:
                    name = f"{each.name} {kind} {size}"
                    run = partial(workers.run, size, kind, plan.crowd_seconds)
                    tasks.append(partial(_together, name, run, tallies[each.name]))
        interleave(1, tasks)
        rounds = interleave(plan.crowd_rounds, tasks)
    for kind in KINDS:
        for each in contenders:
            for size in plan.crowds:
                chart = f"{kind}s of {PAYLOAD // KIB} KiB in a second against processes"
                rate = rounds.summary(f"{each.name} {kind} {size}")
                yield Point(CHAPTER, chart, each.name, each.role, size, "processes", "1/s", rate)
    for name, tally in tallies.items():
        for what, count in tally.failed.items():
            reason = f"{count:,} of {tally.tried:,} operations failed: {what}"
            yield Absent(CHAPTER, f"{name}, a part of its operations", reason)
    yield from _ratios(plan, contenders, rounds)


def _ratios(plan: Plan, contenders: list[Contender], rounds: Rounds) -> Iterable[Ratio]:
    """How many times as many operations as a peer; nothing was promised."""
    most = max(plan.crowds)
    for kind in KINDS:
        for each in contenders:
            for other in contenders:
                if each.backend in PLAIN and other.role != OURS:
                    name, beside = (f"{one.name} {kind} {most}" for one in (each, other))
                    yield Ratio(
                        CHAPTER,
                        f"{each.name}, {kind}s in a second, {most} processes",
                        other.name,
                        "1/s",
                        rounds.summary(name),
                        rounds.summary(beside),
                        rounds.ratio(name, beside),
                        at_least=True,
                    )


def _prepared(each: Contender, folder: Path) -> tuple[str, int]:
    """Makes what is read and what is put into; returns the folder and the latter's cap."""
    population = Population.fill(each, folder / "put", COUNT, PAYLOAD)
    # It could not read a value that it did not compress.
    if each.backend and "zstd" in each.backend:
        opened = each.open(folder / "get", ROOMY)
        for number in range(COUNT):
            opened.put(key(number), value(number, PAYLOAD))
        opened.close()
    else:
        Population.fill(each, folder / "get", COUNT, PAYLOAD)
    return str(folder), population.cap


def _together(name: str, run: Callable[[], list[Any]], tally: Tally) -> Round:
    """Returns the operations in a second of some workers, added up."""
    rate = 0.0
    for done, failed, took in run():
        rate += done / took
        tally.tried += done + sum(failed.values())
        tally.failed.update(failed)
    return {name: rate}


def work(number: int, name: str, folder: str, cap: int) -> Callable[..., object]:
    """Returns what a worker does when it is told to: see `Workers`."""
    contender, choice = BY_NAME[name], random.Random(number)
    readable = contender.open(Path(folder) / "get", ROOMY)
    writable = contender.open(Path(folder) / "put", cap)
    values = [value(number, PAYLOAD) for number in range(16)]
    keys = [key(number) for number in range(COUNT)]
    readable.get(keys[0])
    serial = iter(range(10**9))

    def one(kind: str) -> bool:
        if kind == "get":
            return readable.get(choice.choice(keys)) is not None
        new = next(serial)
        return writable.put(key((number + 1) << 40 | new), values[new % 16]) is not False

    def run(kind: str, seconds: float) -> tuple[int, dict[str, int], float]:
        done, failed = 0, Counter[str]()
        start = now = time.perf_counter()
        while now < start + seconds:
            try:
                fine = one(kind)
            except Exception as error:  # any exception: the chapter counts them
                failed[f"{kind}: {type(error).__name__}: {error}"[:80]] += 1
            else:
                done += fine
                if not fine:
                    failed[f"{kind}: no value" if kind == "get" else "put: not stored"] += 1
            now = time.perf_counter()
        return done, dict(failed), now - start

    return run
