"""Measure: interleaves rounds, sums up many values, and runs whole processes.

Two figures are compared only if both were taken in the same round, a moment apart; what is reported
is the median of the rounds' ratios, with its quartiles. A machine that is slow for a while then
slows both sides, and one odd round decides nothing.
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import TypeVar

T = TypeVar("T")

#: The measurements of one round of one task, by name; usually in seconds.
Round = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Summary:
    """The median of `count` values, with the quartiles below and above it."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Summary":
        """Returns the summary of at least one value."""
        known = sorted(values)
        if len(known) < 2:
            return cls(known[0], known[0], known[0], 1)
        low, _, high = quantiles(known, n=4, method="inclusive")
        return cls(median(known), low, high, len(known))


class Rounds:
    """What every round measured: columns of equal length, by name."""

    def __init__(self) -> None:
        self._columns: dict[str, list[float]] = {}

    def add(self, values: Round) -> None:
        for name, value in values.items():
            self._columns.setdefault(name, []).append(value)

    def __getitem__(self, name: str) -> list[float]:
        return self._columns[name]

    def summary(self, name: str) -> Summary:
        return Summary.of(self[name])

    def less(self, name: str, floor: str | None) -> list[float]:
        """Returns a column less another one, round by round; as it is if there is no other."""
        if floor is None:
            return self[name]
        return [value - base for value, base in zip(self[name], self[floor], strict=True)]

    def ratio(self, above: str, below: str, *, less: str | None = None) -> Summary:
        """Returns the ratio of two columns in each round, both less a third one if named."""
        pairs = zip(self.less(above, less), self.less(below, less), strict=True)
        return Summary.of(a / b for a, b in pairs)


def interleave(rounds: int, tasks: Sequence[Callable[[], Round]]) -> Rounds:
    """Runs every task once per round, in alternating order, and returns what they measured."""
    found = Rounds()
    for number in range(rounds):
        for task in tasks if number % 2 == 0 else reversed(tasks):
            found.add(task())
    return found


def per_call(name: str, function: Callable[[], object], loops: int) -> Callable[[], Round]:
    """Returns a task that calls `function` `loops` times and reports the seconds of one call."""

    def task() -> Round:
        calls = range(loops)
        start = time.perf_counter()
        for _ in calls:
            function()
        return {name: (time.perf_counter() - start) / loops}

    return task


def per_item(name: str, function: Callable[[T], object], items: Sequence[T]) -> Callable[[], Round]:
    """Returns a task that calls `function` with each item and reports the seconds of one call."""

    def task() -> Round:
        start = time.perf_counter()
        for item in items:
            function(item)
        return {name: (time.perf_counter() - start) / len(items)}

    return task


def raw_read(path: str) -> bytes:
    """What a hit from a file is compared with: open, fstat, read, close."""
    descriptor = os.open(path, os.O_RDONLY)
    content = os.read(descriptor, os.fstat(descriptor).st_size)
    os.close(descriptor)
    return content


@dataclass(frozen=True, slots=True)
class Process:
    """A process that has ended: wall time from its start to its end, CPU time, and its output."""

    seconds: float
    cpu_seconds: float
    output: str


#: The end of a program: prints the peak of its resident memory in bytes, on a line of its own.
#: `resource` is of no use here: its figure includes the process before it became Python.
PRINT_PEAK = """
with open("/proc/self/status", encoding="ascii") as status:
    fields = dict(line.split(":", 1) for line in status)
print(int(fields["VmHWM"].split()[0]) * 1024)
"""


def clean_environment() -> dict[str, str]:
    """Returns the environment of new processes.

    It is this process's without what is set for Python and for kcache, so that compiled modules are
    written and used as in anybody's installation, and with NVRTC's own cache switched off.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "KCACHE_"))
    } | {"CUDA_CACHE_DISABLE": "1"}


def run_python(code: str, folder: Path) -> Process:
    """Runs `python -c code` with `folder` as its working directory.

    Raises RuntimeError if it fails; see `clean_environment`.
    """
    environment = clean_environment()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise RuntimeError(f"python -c {code[:200]!r}... failed:\n{done.stderr}")
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Process(seconds, cpu, done.stdout)
