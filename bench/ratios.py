"""Ratios: divides the times of two rows of a group lap by lap, and checks targets for the ratios.

A row is a benchmark in the form of pytest-benchmark's JSON. `conftest.py` adds to its `extra_info`:
`row`, the name of the contender; `laps`, the median of each lap; and `targets`. A benchmark that
finds out a fact adds `found`, the fact in words, and `right`, whether it is as it should be.
"""

from collections.abc import Iterable, Iterator, Mapping
from statistics import median, quantiles
from typing import Any, NamedTuple

Row = Mapping[str, Any]
Group = Mapping[str, Row]


class Ratio(NamedTuple):
    """The median of the laps' ratios, and their lower and upper quartiles."""

    median: float
    low: float
    high: float


class Checked(NamedTuple):
    """A target, and the ratio that was measured."""

    group: str
    row: str
    to: str
    most: float
    ratio: Ratio

    @property
    def met(self) -> bool:
        return self.ratio.median <= self.most


def groups(benchmarks: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Return the rows by the name of their group and their own name, both in the run's order."""
    found: dict[str, dict[str, Row]] = {}
    for each in benchmarks:
        found.setdefault(each["group"], {})[each["extra_info"]["row"]] = each
    return found


def laps(row: Row) -> dict[str, float]:
    values: dict[str, float] = row["extra_info"]["laps"]
    return values


def ratio(row: Row, to: Row, less: Row | None = None) -> Ratio | None:
    """Return the ratio of `row` to `to`, or None if they have no lap in common.

    If `less` is given, its time is subtracted from both first.
    """
    above, below = laps(row), laps(to)
    base = laps(less) if less is not None else dict.fromkeys(above, 0.0)
    both = above.keys() & below.keys() & base.keys()
    found = sorted((above[lap] - base[lap]) / (below[lap] - base[lap]) for lap in both)
    if not found:
        return None
    low, _, high = quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3
    return Ratio(median(found), low, high)


def reference(group: Group) -> str:
    """Return the name of the row that the others are compared with: kcache's first one."""
    return next((name for name in group if name.startswith("kcache")), next(iter(group)))


def targets(found: Mapping[str, Group]) -> Iterator[Checked]:
    """Yield each target whose rows were measured."""
    for name, group in found.items():
        for row, benchmark in group.items():
            for target in benchmark["extra_info"].get("targets", ()):
                to, most, less = target["to"], target["most"], target["less"]
                if {to, less or to} <= group.keys():
                    measured = ratio(benchmark, group[to], group[less] if less else None)
                    if measured is not None:
                        yield Checked(name, row, to, most, measured)


def times(value: float) -> str:
    """Return a ratio as text with three digits; below 0.5, as a fraction such as `1/8`."""
    if 0 < value < 0.5:
        return f"1/{digits(1 / value)}"
    return digits(value)


def digits(value: float) -> str:
    """Return a number as text with three significant digits, without an exponent."""
    if abs(value) >= 100:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}"
