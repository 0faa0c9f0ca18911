"""Resident memory: what a process takes that opens a population, reads and puts.

A new process each time. Anonymous memory is what no file is behind: a database that is mapped
belongs to the page cache, which gives its pages back.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

from harness.measure import Round, run_python
from harness.plan import KIB

from contenders.contenders import OURS
from contenders.population import Population, key
from contenders.puts_at_cap import UNUSED, Putting

GETS = PUTS = 1_000
#: A peer puts for at most this many seconds, and at least twice.
LONGEST = 0.2
#: The share of the youngest entries that is read. They are there even just after a trim.
YOUNGEST = 0.8

_CHILD = """\
import sys
sys.path.insert(0, {bench!r})
from contenders.resident_memory import work
work({population!r}, {first})
"""


def tasks(name: str, population: Population) -> Iterator[Round]:
    """Yields what a new process takes, in bytes: "NAME opened", "NAME used" and "NAME peak".

    The first two are given as resident and as anonymous memory, the peak is resident.
    """
    described = json.dumps({**asdict(population), "directory": str(population.directory)})
    bench, first = str(Path(__file__).parents[1]), UNUSED
    stages = ("opened", "opened anonymous", "used", "used anonymous", "peak")
    while True:
        code = _CHILD.format(bench=bench, population=described, first=first)
        *sizes, first = map(int, run_python(code, population.directory).output.split())
        yield {f"{name} {stage}": size for stage, size in zip(stages, sizes, strict=True)}


def task(name: str, population: Population) -> "partial[Round]":
    """Returns `tasks` as a task."""
    return partial(next, tasks(name, population))


def work(described: str, first: int) -> None:
    """What the new process does."""
    plain: dict[str, Any] = json.loads(described)
    plain["directory"] = Path(plain["directory"])
    population = Population(**plain)
    putting = Putting(population, first)
    putting.opened.used()
    opened = _memory()
    # The youngest entries are those of earlier processes, then those of the population.
    young = chain(range(first - 1, UNUSED - 1, -1), range(population.count - 1, -1, -1))
    some = islice(young, min(int(YOUNGEST * population.count), GETS))
    keys = [key(number) for number in reversed(list(some))]  # so that they remain the youngest
    for _, name in zip(range(GETS), cycle(keys), strict=False):
        # A peer may evict in another order, or more than it must.
        if putting.opened.get(name) is None and population.contender.role == OURS:
            raise SystemExit("not a hit")
    end = time.perf_counter() + LONGEST
    for number in range(PUTS):
        putting.put(*putting.new(1))
        if number and population.contender.role != OURS and time.perf_counter() > end:
            break
    used = _memory()
    putting.opened.close()
    sys.stdout.write(" ".join(map(str, (*opened[:2], *used, putting.next))) + "\n")


def _memory() -> tuple[int, int, int]:
    """Returns resident, anonymous and peak resident bytes of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    resident, anonymous, peak = (
        int(fields[name].split()[0]) * KIB for name in ("VmRSS", "RssAnon", "VmHWM")
    )
    return resident, anonymous, peak
