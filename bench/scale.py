"""The chapters about many entries: what a put at the cap, opening and memory cost among them."""

import itertools
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from findings import Comparison, Fact, Ratio, Timing
from looks import Looks
from measure import Round, interleave, per_item, run_python
from peer import peer_module
from plan import KIB, Found, Plan
from population import Population, entry, key, new_entries

import kcache
from kcache.eviction import EVICT_BATCH

#: A round of puts at the cap has this many, so that it holds as many trims as any other: a put
#: that finds no room evicts what the next `EVICT_BATCH` need.
PUTS = 4 * (EVICT_BATCH + 1)
#: Of the peer, which scans everything in each: a tenth of a second.
PEER_PUTS = 4
PEER_ENTRIES = 10_000
#: What the issue allows a put to look at: on average, and the largest one.
MEAN_LOOKS, MOST_LOOKS = 10, 4_096
OPENINGS = 20
GETS = 500
#: The full run keeps 10 GB of entries of 100 KiB; with less room than this it makes them of 4 KiB.
ROOM = 40 << 30
MEMORY_ROUNDS = 5
#: Numbers from here on are those of no entry that a chapter has put before.
UNUSED = 10_000_000
#: This share of a population's youngest entries is there even just after a trim.
LIVING = 0.85


class PuttingEngine:
    """An engine at its cap, and tasks that put into it what it does not hold yet."""

    def __init__(self, population: Population, first: int | None = None) -> None:
        self.population = population
        self.engine = population.open()
        #: The number of the next new entry.
        self.next = population.count if first is None else first

    def new(self, count: int) -> list[tuple[str, kcache.Entry]]:
        first, self.next = self.next, self.next + count
        return new_entries(first, count, self.population.payload)

    def put(self, new: tuple[str, kcache.Entry]) -> None:
        if not self.engine.put(*new):
            raise RuntimeError("not stored")

    def task(self, name: str, count: int) -> Callable[[], Round]:
        """Returns a task that reports the seconds of one put, as the mean of `count`.

        What it evicts is on disk, as what was put long ago is: to remove a file that never got
        there is cheaper, and a small population would consist of those.
        """

        def task() -> Round:
            evicted = self.engine.stats().evictions
            new = self.new(count)
            os.sync()
            found = per_item(name, self.put, new)()
            if self.engine.stats().evictions == evicted:
                raise RuntimeError("nothing was evicted")
            return found

        return task

    def looks(self) -> list[int]:
        """Returns how many files each of many puts looks at."""
        counts = []
        for new in self.new(2 * PUTS):
            with Looks() as looks:
                self.put(new)
            counts.append(looks.count)
        return counts

    def settle(self) -> None:
        """Brings it to what it is like in the long run, unmeasured."""
        for new in self.new(PUTS):
            self.put(new)


# -- files and lmdb: 1,000 entries against 100,000 -----------------------------------------------


def files(plan: Plan, folder: Path) -> Found:
    """The file backend, and zstd above it, with few entries and with many."""
    payload = plan.file_payload
    if payload * plan.many > (1 << 30) and shutil.disk_usage(folder).free < ROOM:
        print(f"less than {ROOM >> 30} GiB of disk: entries of 4 KiB", file=sys.stderr)
        payload = 4 * KIB
    yield from _scale("files", plan, folder, "file", payload)


def lmdb(plan: Plan, folder: Path) -> Found:
    """The LMDB backend, and zstd above it, with few entries and with many."""
    yield from _scale("lmdb", plan, folder, "lmdb", 4 * KIB)


def _scale(chapter: str, plan: Plan, folder: Path, backend: str, payload: int) -> Found:
    empty, few, many = (
        Population.fill(folder / str(count), backend, count, payload)
        for count in (0, plan.few, plan.many)
    )
    os.sync()  # what is written later is not what is measured
    yield from _opening(chapter, plan, empty, many)
    wrapper = "zstd" if backend == "file" else "zstd+lmdb"
    wrapped = [population.under(wrapper) for population in (empty, many)]
    yield from _opening(chapter, plan, *wrapped)
    for population in (empty, many):
        os.rename(population.directory / wrapper, population.directory / backend)
    yield from _memory(chapter, few, many)
    yield from _puts(chapter, plan, few, many)


def _puts(chapter: str, plan: Plan, few: Population, many: Population) -> Found:
    small, large = PuttingEngine(few, UNUSED), PuttingEngine(many, UNUSED)
    with small.engine, large.engine:
        small.settle()
        large.settle()
        os.sync()
        rounds = interleave(plan.fills, [small.task("few", PUTS), large.task("many", PUTS)])
        looks = large.looks() if chapter == "files" else []
    yield Comparison(chapter, rounds).ratio(
        f"`{few.backend}`, put at the cap among {many.describe()}",
        "many",
        f"among {few.count:,}",
        "few",
        target=2.0,
    )
    if looks:
        mean, most = sum(looks) / len(looks), max(looks)
        put = f"`{few.backend}`, put at the cap among {many.count:,} entries: files looked at"
        yield Fact(
            chapter, f"{put}, mean", f"{mean:.2f}", f"≤ {MEAN_LOOKS}", 0 < mean <= MEAN_LOOKS
        )
        yield Fact(chapter, f"{put}, most", f"{most:,}", f"≤ {MOST_LOOKS:,}", most <= MOST_LOOKS)


def _opening(chapter: str, plan: Plan, empty: Population, many: Population) -> Found:
    tasks = [partial(_open, "empty", empty), partial(_open, "many", many)]
    interleave(2, tasks)
    rounds = interleave(plan.calls, tasks)
    yield Comparison(chapter, rounds).ratio(
        f"`{many.backend}`, open and ask for usage, {many.describe()}",
        "many",
        "an empty one",
        "empty",
        target=1.5,
    )


def _open(name: str, population: Population) -> Round:
    """The seconds of opening and asking for usage; closing is not part of it."""
    seconds = 0.0
    for _ in range(OPENINGS):
        start = time.perf_counter()
        engine = population.open()
        held = engine.size_bytes
        seconds += time.perf_counter() - start
        engine.close()
        if held > population.cap or bool(held) != bool(population.count):
            raise RuntimeError(f"{held} bytes in use")
    return {name: seconds / OPENINGS}


_MEMORY = """\
import sys
sys.path.insert(0, {bench!r})
from pathlib import Path
from population import Population, key
from scale import PuttingEngine, resident

population = Population(Path({directory!r}), {backend!r}, {count}, {payload}, {cap})
putting = PuttingEngine(population, {first})
putting.engine.size_bytes
opened = resident()
for number in range(1_000):
    if putting.engine.get(key({first} - 1 - number % 800)) is None:
        raise SystemExit("not a hit")
for _ in range(1_000):
    putting.put(putting.new(1)[0])
print(*opened, *resident())
"""


def resident() -> tuple[int, int]:
    """Returns the resident bytes of this process: all of them, and those no file is behind."""
    fields = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    )
    all_, anonymous = (int(fields[name].split()[0]) * KIB for name in ("VmRSS", "RssAnon"))
    return all_, anonymous


def _memory(chapter: str, few: Population, many: Population, firsts: tuple[int, ...] = ()) -> Found:
    """Resident bytes of fresh processes; LMDB's mapped pages belong to the page cache.

    `firsts` are the numbers of the next new entries, where some were put already.
    """
    few_first, many_first = firsts or (few.count, many.count)
    which = 1 if few.backend == "lmdb" else 0
    tasks = [
        partial(_resident, "few", few, which, itertools.count(few_first, 1_000)),
        partial(_resident, "many", many, which, itertools.count(many_first, 1_000)),
    ]
    interleave(1, tasks)
    rounds = interleave(MEMORY_ROUNDS, tasks)
    kind = "anonymous" if which else "resident"
    for stage, words in {
        "opened": "open, usage",
        "used": "the same, 1,000 gets, 1,000 puts at the cap",
    }.items():
        yield Ratio(
            chapter,
            f"`{few.backend}`, {kind} memory of a process, {many.count:,} entries: {words}",
            f"{few.count:,} entries",
            "B",
            rounds.summary(f"many {stage}"),
            rounds.summary(f"few {stage}"),
            rounds.ratio(f"many {stage}", f"few {stage}"),
            target=1.05,
        )


def _resident(name: str, population: Population, which: int, firsts: Iterator[int]) -> Round:
    code = _MEMORY.format(
        bench=str(Path(__file__).parent),
        directory=str(population.directory),
        backend=population.backend,
        count=population.count,
        payload=population.payload,
        cap=population.cap,
        first=next(firsts),
    )
    values = [int(word) for word in run_python(code, population.directory).output.split()]
    return {f"{name} opened": values[which], f"{name} used": values[2 + which]}


# -- million: LMDB from a thousand entries to a million ------------------------------------------


def million(plan: Plan, folder: Path) -> Found:
    """LMDB with entries of 1 KiB: what each operation costs among how many."""
    empty = Population.fill(folder / "0", "lmdb", 0, KIB)
    populations = [Population.fill(folder / str(count), "lmdb", count, KIB) for count in plan.sizes]
    os.sync()
    yield from _opening("million", plan, empty, populations[-1])
    engines = [PuttingEngine(population) for population in populations]
    for each in engines:
        each.settle()
    os.sync()
    rounds = interleave(plan.fills, [task for each in engines for task in _operations(each)])
    for each in engines:
        each.engine.close()
    # LMDB copies the pages that a transaction changes: more of them among 10,000 entries than
    # among 1,000, but no more among more.
    few, many = engines[-2:]
    yield from _memory("million", few.population, many.population, (few.next, many.next))
    for population in populations:
        row = f"{population.count:,} entries"
        for operation in ("put", "get", "coldest"):
            column = {
                "put": "`lmdb`, 1 KiB: put at the cap",
                "get": "`lmdb`, 1 KiB: get",
                "coldest": "`lmdb`, 1 KiB: first of `coldest`",
            }[operation]
            summary = rounds.summary(f"{operation} {population.count}")
            yield Timing("million", row, column, summary)
    ratio = Comparison("million", rounds).ratio
    last, first = populations[-1].count, populations[0].count
    for operation, words in {
        "put": "put at the cap",
        "get": "get",
        "coldest": "first of `coldest`",
    }.items():
        yield ratio(
            f"`lmdb`, {words} among {last:,} entries of 1 KiB",
            f"{operation} {last}",
            f"among {first:,}",
            f"{operation} {first}",
            target=2.0 if operation == "put" else None,
        )


def _operations(each: PuttingEngine) -> Iterator[Callable[[], Round]]:
    count, engine = each.population.count, each.engine
    choice = random.Random(count)

    def get() -> Round:
        youngest = range(each.next - int(LIVING * count), each.next)
        keys = [key(number) for number in choice.sample(youngest, GETS)]
        found = per_item(f"get {count}", engine.get, keys)()
        if engine.stats().misses:
            raise RuntimeError("not a hit")
        return found

    def coldest() -> Round:
        next(engine.backend.coldest())  # writes the uses that were noted: not what is timed
        start = time.perf_counter()
        first = next(engine.backend.coldest(), None)
        seconds = time.perf_counter() - start
        if first is None:
            raise RuntimeError("no entries")
        return {f"coldest {count}": seconds}

    yield each.task(f"put {count}", PUTS)
    yield get
    yield coldest


# -- peer: puts at the cap beside cuda.core's ----------------------------------------------------


def peer(plan: Plan, folder: Path) -> Found:
    """Puts at the cap among 10,000 entries, beside cuda.core's cache in files."""
    for backend, payload in (("file", plan.file_payload), ("lmdb", 4 * KIB)):
        ours = PuttingEngine(Population.fill(folder / backend, backend, PEER_ENTRIES, payload))
        theirs, free = _peer_tasks(folder / f"peer of {backend}", payload)
        with ours.engine:
            ours.settle()
            os.sync()
            rounds = interleave(plan.fills, [ours.task("ours", PUTS), theirs, free])
        ratio = partial(Comparison("peer", rounds).ratio, at_least=True)
        what = f"`{backend}`, put at the cap among {PEER_ENTRIES:,} entries of {payload // KIB} KiB"
        yield ratio(what, "ours", "`FileStreamProgramCache`, likewise", "theirs", target=100.0)
        yield ratio(what, "ours", "`FileStreamProgramCache`, without a cap", "free")


def _peer_tasks(folder: Path, payload: int) -> tuple[Callable[[], Round], Callable[[], Round]]:
    """Returns tasks that put into the peer's cache: at its cap, and one without a cap."""
    make = peer_module(".utils").FileStreamProgramCache
    free = make(folder)
    numbers = itertools.count()

    def put(cache: Any, count: int, name: str) -> Round:
        new = [(os.urandom(32), _payload(next(numbers), payload)) for _ in range(count)]

        def put_one(pair: tuple[bytes, bytes]) -> None:
            cache[pair[0]] = pair[1]

        return per_item(name, put_one, new)()

    for _ in range(PEER_ENTRIES // 100):
        put(free, 100, "filled")
    os.sync()
    capped = make(folder, max_size_bytes=PEER_ENTRIES * payload)
    apart = make(folder.with_name(folder.name + " without a cap"))

    def at_the_cap() -> Round:
        found = put(capped, PEER_PUTS, "theirs")
        if len(capped) != PEER_ENTRIES:
            raise RuntimeError(f"the peer holds {len(capped)} entries, not {PEER_ENTRIES}")
        return found

    at_the_cap()
    return at_the_cap, lambda: put(apart, 10 * PEER_PUTS, "free")


def _payload(number: int, size: int) -> bytes:
    return entry(number, size).payload["cubin"]
