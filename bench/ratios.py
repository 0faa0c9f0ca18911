"""Ratios: what two rows of a group measured lap by lap, divided, and the targets for that.

A row is a benchmark as pytest-benchmark's JSON has it. `conftest.py` adds to its `extra_info`:
`row`, the contender; `laps`, the median of each lap; `targets`. A benchmark that finds out a fact
adds `found`, in words, and `right`.
"""

from collections.abc import Iterable, Iterator, Mapping
from statistics import median, quantiles
from typing import Any, NamedTuple

Row = Mapping[str, Any]
Group = Mapping[str, Row]


class Ratio(NamedTuple):
    """The median of the laps' ratios, and their quartiles."""

    median: float
    low: float
    high: float


class Checked(NamedTuple):
    """A target, and what was measured."""

    group: str
    row: str
    to: str
    most: float
    ratio: Ratio

    @property
    def met(self) -> bool:
        return self.ratio.median <= self.most


def groups(benchmarks: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Return the rows by group and name, both in the order of the run."""
    found: dict[str, dict[str, Row]] = {}
    for each in benchmarks:
        found.setdefault(each["group"], {})[each["extra_info"]["row"]] = each
    return found


def laps(row: Row) -> dict[str, float]:
    values: dict[str, float] = row["extra_info"]["laps"]
    return values


def ratio(row: Row, to: Row, less: Row | None = None) -> Ratio | None:
    """Return the ratio of two rows, each less a third; None if they have no lap in common."""
    above, below = laps(row), laps(to)
    base = laps(less) if less is not None else dict.fromkeys(above, 0.0)
    both = above.keys() & below.keys() & base.keys()
    found = sorted((above[lap] - base[lap]) / (below[lap] - base[lap]) for lap in both)
    if not found:
        return None
    low, _, high = quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3
    return Ratio(median(found), low, high)


def reference(group: Group) -> str:
    """Return the row that the others are compared with: the first of kcache's."""
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
    """Return a ratio in three digits; a small one as a fraction."""
    if 0 < value < 0.5:
        return f"1/{digits(1 / value)}"
    return digits(value)


def digits(value: float) -> str:
    """Return three significant digits, without an exponent."""
    if abs(value) >= 100:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}"
