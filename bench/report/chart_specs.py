"""Chart specs: which charts a chapter has, as data; `draw` draws them with Matplotlib."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from harness.findings import Point, Timing
from harness.measure import Summary
from harness.names import OURS, role_of

from report.evidence import Evidence
from report.notation import count, quantity, size

#: The tables of times that are drawn, by chapter, and what their rows are. One column makes one
#: group.
BARS = {
    ("kernels", "kernel"): "Compile once, hit ever after: time until the kernel is there",
    ("start", "process"): "A new process gets its kernel: from start to end",
}
#: A column that is a part of another column has no bar of its own.
WITHIN = "of which "
#: The chart for people who read only one: these columns of the first chart, under other names.
WHY = {
    "bare NVRTC": "NVRTC, each time",
    "hot, fresh process": "kcache, in a new process",
    "hot from memory": "kcache, asked again",
}
WHY_TITLE = "Compile a kernel, or get it from kcache"


@dataclass(frozen=True, slots=True)
class Mark:
    """One point or one bar: where it is, and how large.

    Attributes:
        at: the figure on the horizontal axis of a line, the label of a bar.
        figure: how much.
    """

    at: float | str
    figure: Summary


@dataclass(frozen=True, slots=True)
class Series:
    """What has one colour. `role` is "ours", "peer" or "floor"."""

    name: str
    role: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """Data of a chart.

    Attributes:
        name: unique over all chapters; the name of its files.
        title: its heading.
        kind: "lines" or "bars".
        axis: what is on the horizontal axis of lines; what the groups of bars are.
        unit: of every figure.
        series: in the order of the legend.
    """

    name: str
    title: str
    kind: str
    axis: str
    unit: str
    series: tuple[Series, ...]

    def digest(self) -> str:
        """Returns a digest of the data, which the drawn files carry."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode(), usedforsecurity=False).hexdigest()[:32]

    def groups(self) -> list[str]:
        """Returns the labels of bars, in order."""
        return list(dict.fromkeys(str(m.at) for each in self.series for m in each.marks))

    def alternative(self) -> str:
        """Returns the chart in words, for people who can't see it."""
        text = {"bytes": size}.get(self.axis, count)
        said: list[str] = []
        for each in self.series:
            if self.kind == "bars":
                figures = [
                    f"{m.at} {quantity(m.figure.median, self.unit)}".strip() for m in each.marks
                ]
            else:
                ends = dict.fromkeys((each.marks[0], each.marks[-1]))
                figures = [
                    f"{quantity(m.figure.median, self.unit)} at {text(float(m.at))}" for m in ends
                ]
            said.append(f"{plain(each.name)}: {', '.join(figures)}")
        over = f", against {self.axis}" if self.kind == "lines" else ""
        return plain(f"{self.title}{over}. {'; '.join(said)}.").replace('"', "'")


def plain(text: str) -> str:
    """Returns text without the marks of Markdown."""
    return text.replace("`", "").replace("**", "")


def charts_of(evidence: Evidence, chapter: str) -> Iterator[Chart]:
    """Yields a chapter's charts: bars from its tables of times, lines from its points."""
    timings = list(evidence.timings(chapter))
    for (name, prefix), title in BARS.items():
        those = [
            timing
            for timing in timings
            if timing.column.startswith(f"{prefix}: ")
            and not timing.column.startswith(f"{prefix}: {WITHIN}")
        ]
        if name == chapter and those:
            yield _bars(f"{name}-{prefix}", title, prefix, those)
    points = list(evidence.points(chapter))
    for chart in dict.fromkeys(point.chart for point in points):
        yield _lines(chapter, chart, [point for point in points if point.chart == chart])


def all_charts(evidence: Evidence) -> dict[str, Chart]:
    """Returns every chart by name, the one for the first page included."""
    found = {
        chart.name: chart for name in evidence.chapters() for chart in charts_of(evidence, name)
    }
    if first := why(evidence):
        found[first.name] = first
    return found


def why(evidence: Evidence) -> Chart | None:
    """Returns the chart for people who read only one, or None where its chapter was not run."""
    those = [
        timing
        for timing in evidence.timings("kernels")
        if timing.column.startswith("kernel: ") and timing.column.partition(": ")[2] in WHY
    ]
    return _bars("why", WHY_TITLE, "kernel", those, WHY) if those else None


def _bars(
    name: str,
    title: str,
    prefix: str,
    timings: list[Timing],
    names: Mapping[str, str] | None = None,
) -> Chart:
    """Makes a chart of a table; `names` are those of its columns, if not by their own."""
    names = names or {}
    columns = dict.fromkeys(timing.column.partition(": ")[2] for timing in timings)
    rows = dict.fromkeys(timing.row for timing in timings)
    if len(columns) == 1:
        marks = {each.row: Mark("", each.seconds) for each in timings}
        series = tuple(Series(row, role_of(row), (marks[row],)) for row in rows)
    else:
        series = tuple(
            Series(
                names.get(column, f"{OURS}, {column}" if role_of(column) == "ours" else column),
                role_of(column),
                tuple(
                    Mark(plain(each.row), each.seconds)
                    for each in timings
                    if each.column == f"{prefix}: {column}"
                ),
            )
            for column in columns
        )
    return Chart(name, title, "bars", prefix, "s", series)


def _lines(chapter: str, chart: str, points: list[Point]) -> Chart:
    series: dict[tuple[str, str], list[Mark]] = {}
    for point in points:
        series.setdefault((point.series, point.role), []).append(Mark(point.x, point.y))
    order = ("ours", "peer", "floor")
    return Chart(
        name=f"{chapter}-{slug(chart)}",
        title=chart[:1].upper() + chart[1:],
        kind="lines",
        axis=points[0].x_name,
        unit=points[0].unit,
        series=tuple(
            Series(name, role, tuple(sorted(marks, key=lambda mark: float(mark.at))))
            for (name, role), marks in sorted(series.items(), key=lambda it: order.index(it[0][1]))
        ),
    )


def slug(text: str) -> str:
    """Returns a text as a part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
