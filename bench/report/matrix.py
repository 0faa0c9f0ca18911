"""Matrix: everybody in a column of their own, beside us."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.findings import Fact
from harness.names import OURS

from report.evidence import Evidence, compared
from report.notation import quantity, table


def matrix(facts: Iterable[Fact]) -> str:
    """Returns facts that compare as a table, a row for what and a column for who; "" if none."""
    cells: dict[tuple[str, str], Fact] = {}
    for fact in facts:
        if whom := compared(fact):
            cells[whom] = fact
    everything = list(dict.fromkeys(what for what, _ in cells))
    everyone = sorted(dict.fromkeys(who for _, who in cells), key=lambda w: not w.startswith(OURS))
    rows = [(what, *(cell(cells.get((what, who))) for who in everyone)) for what in everything]
    return table(("", *everyone), rows) if cells else ""


def cell(fact: Fact | None) -> str:
    """Returns what was found; in bold type where it is not as it should be."""
    if fact is None:
        return ""
    return f"**{fact.found}**" if fact.target and not fact.met else fact.found


# -- the comparison for the first page ------------------------------------------------------------

#: The columns of that table, and the possible names of their figures. The first name that exists
#: counts.
COLUMNS = {
    "kcache": ("kcache", "kcache `file`", "kcache, hit"),
    "cuda.core": ("cuda.core FileStream", "cuda.core FileStream, hit", "cuda.core"),
    "diskcache": ("diskcache",),
    "JAX LRUCache": ("JAX LRUCache",),
    "SQLite": ("SQLite",),
}


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the table: what it says, and which figures it shows.

    Attributes:
        label: what the row is about.
        chapter: who measured it.
        what: a chart of points, a column of times, or what facts are about: a regular expression.
        x: the place on the chart's axis; None for other than points.
    """

    label: str
    chapter: str
    what: str
    x: float | None = None


#: The rows of the first page.
FIRST_PAGE = (
    Line("a new process gets its kernel", "start", "process: start to end"),
    Line("get 100 KiB", "sizes", "get against size", 100 << 10),
    Line("put into a full cache of 10,000", "growth", "put of .* at the cap against entries", 1e4),
    Line("16 processes want one kernel: compiles", "stampede", "compiles of .* by 16 processes"),
    Line("a header is edited: what comes back", "trust", "an included header is edited.*"),
    Line("an entry's file is cut short", "trust", "the file that holds an entry is cut .*"),
    Line("the disk is full during a compile", "trust", "no file may grow .*"),
    Line("8 writers, cap of 1 MB: on disk", "trust", "bytes on disk after 8 writers.* 1.00 MB.*"),
)
#: The rows of the page about the benchmarks.
LINES = (
    *FIRST_PAGE[:2],
    Line("put 100 KiB", "sizes", "put against size", 100 << 10),
    *FIRST_PAGE[2:3],
    Line("open a cache of 10,000 entries", "growth", "opening against entries", 1e4),
    *FIRST_PAGE[3:],
)


def comparison(evidence: Evidence, lines: Sequence[Line]) -> tuple[str, list[str]]:
    """Returns a table of those rows and the chapters that it is from; "" if none was run."""
    rows: list[tuple[str, ...]] = []
    chapters: list[str] = []
    for line in lines:
        found = dict(_figures(evidence, line))
        if found:
            names = ((name for name in names if name in found) for names in COLUMNS.values())
            first = (next(each, None) for each in names)
            rows.append((line.label, *("-" if name is None else found[name] for name in first)))
            chapters.append(line.chapter)
    return (table(("", *COLUMNS), rows) if rows else "", chapters)


def _figures(evidence: Evidence, line: Line) -> Iterator[tuple[str, str]]:
    """Yields who, and the figure."""
    for point in evidence.points(line.chapter):
        if point.x == line.x and re.fullmatch(line.what, point.chart):
            yield point.series, quantity(point.y.median, point.unit)
    for timing in evidence.timings(line.chapter):
        if re.fullmatch(line.what, timing.column):
            yield timing.row, quantity(timing.seconds.median, "s")
    for fact in evidence.facts(line.chapter):
        whom = compared(fact)
        if whom is not None and re.fullmatch(line.what, whom[0]):
            yield whom[1], cell(fact)
