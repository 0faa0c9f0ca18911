"""Findings: what a benchmark run found out, as values, as JSON and as Markdown tables."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from measure import Rounds, Summary


@dataclass(frozen=True, slots=True)
class Ratio:
    """Two figures taken side by side, and their ratio.

    Attributes:
        chapter: the chapter that measured it.
        figure: what is measured.
        against: what it is compared with.
        unit: "s" or "B".
        ours, other: the two figures.
        ratio: ours over other, or other over ours for `at_least`, round by round.
        target: what the ratio shall be at most, or at least; None where nothing was promised.
        at_least: whether a larger ratio is better.
    """

    chapter: str
    figure: str
    against: str
    unit: str
    ours: Summary
    other: Summary
    ratio: Summary
    target: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the target."""
        return None if self.target is None else self._reaches(self.ratio.median, self.target)

    @property
    def certain(self) -> bool:
        """Whether both quartiles say the same as the median."""
        if self.target is None:
            return True
        ends = (self.ratio.low, self.ratio.high)
        return all(self._reaches(end, self.target) == self.met for end in ends)

    def _reaches(self, value: float, target: float) -> bool:
        return value >= target if self.at_least else value <= target


@dataclass(frozen=True, slots=True)
class Comparison:
    """Makes the ratios of a chapter from its rounds."""

    chapter: str
    rounds: Rounds

    def ratio(
        self,
        figure: str,
        ours: str,
        against: str,
        other: str,
        *,
        less: str | None = None,
        target: float | None = None,
        at_least: bool = False,
    ) -> Ratio:
        """Returns the ratio of two columns, both less a third one if named; see `Ratio`."""
        above, below = (other, ours) if at_least else (ours, other)
        return Ratio(
            self.chapter,
            figure,
            against,
            "s",
            Summary.of(self.rounds.less(ours, less)),
            Summary.of(self.rounds.less(other, less)),
            self.rounds.ratio(above, below, less=less),
            target,
            at_least,
        )


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that is so or not, rather than more or less."""

    chapter: str
    figure: str
    found: str
    target: str
    met: bool


@dataclass(frozen=True, slots=True)
class Timing:
    """One cell of a table of times.

    `column` is "what the rows are: what the column is".
    """

    chapter: str
    row: str
    column: str
    seconds: Summary


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a line in a chart, and one cell of the table below it.

    Attributes:
        chapter: the chapter that measured it.
        chart: what the chart shows, unique in its chapter, such as "get against size".
        series: whose line it is, such as "kcache `file`", "cuda.core FileStream", "raw read".
        role: "ours", "peer" or "floor".
        x: where it is on the horizontal axis.
        x_name: what that axis counts: "bytes", "entries", "processes", "headers".
        unit: "s", "B" or "1/s".
        y: the figure.
    """

    chapter: str
    chart: str
    series: str
    role: str
    x: float
    x_name: str
    unit: str
    y: Summary


@dataclass(frozen=True, slots=True)
class Absent:
    """A peer, or a part of the machine, that a chapter could not measure here, and why."""

    chapter: str
    who: str
    reason: str


@dataclass
class Findings:
    """Everything that was found out, with what it was measured by and on."""

    date: str
    command: str
    machine: dict[str, str]
    versions: Mapping[str, str]
    ratios: list[Ratio] = field(default_factory=list[Ratio])
    facts: list[Fact] = field(default_factory=list[Fact])
    timings: list[Timing] = field(default_factory=list[Timing])
    points: list[Point] = field(default_factory=list[Point])
    absent: list[Absent] = field(default_factory=list[Absent])

    def add(self, found: Iterable[Ratio | Fact | Timing | Point | Absent]) -> None:
        for each in found:
            match each:
                case Ratio():
                    self.ratios.append(each)
                case Fact():
                    self.facts.append(each)
                case Timing():
                    self.timings.append(each)
                case Point():
                    self.points.append(each)
                case Absent():
                    self.absent.append(each)

    def to_json(self) -> dict[str, Any]:
        """Returns plain values; whether a target is met is added for those who read the file."""
        plain = asdict(self)
        for ratio, values in zip(self.ratios, plain["ratios"], strict=True):
            values["met"] = ratio.met
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "Findings":
        found = cls(plain["date"], plain["command"], plain["machine"], plain["versions"])
        for values in plain["ratios"]:
            rest = {name: value for name, value in values.items() if name != "met"}
            for name in ("ours", "other", "ratio"):
                rest[name] = Summary(**rest[name])
            found.ratios.append(Ratio(**rest))
        found.facts += (Fact(**values) for values in plain["facts"])
        for values in plain["timings"]:
            found.timings.append(Timing(**{**values, "seconds": Summary(**values["seconds"])}))
        for values in plain.get("points", ()):  # results of before 2026-11-22 have none
            found.points.append(Point(**{**values, "y": Summary(**values["y"])}))
        found.absent += (Absent(**values) for values in plain.get("absent", ()))
        return found


# -- as Markdown ---------------------------------------------------------------------------------


def as_markdown(found: Findings, chapters: Mapping[str, str]) -> str:
    """Returns the tables; `chapters` maps the name of each chapter to its title, in order."""
    parts = [_how(found), "### Targets", *_targets(found)]
    for chapter, title in chapters.items():
        tables = _chapter(found, chapter)
        if tables:
            command = f"python bench/ratios.py --only {chapter}"
            parts += [f"### {title}", f"`{command}`", *tables]
    return "\n\n".join(parts) + "\n"


def _how(found: Findings) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in found.machine.items())
    versions = ", ".join(f"{name} {value}" for name, value in found.versions.items())
    return (
        f"Measured on {found.date} by `{found.command}`.\\\n"
        f"Machine: {machine}.\\\nVersions: {versions}."
    )


def _targets(found: Findings) -> list[str]:
    """Returns how many targets are met, and a table of all of them."""
    promised = [ratio for ratio in found.ratios if ratio.target is not None]
    verdicts = [*(ratio.met for ratio in promised), *(fact.met for fact in found.facts)]
    rows = [
        (
            f"{ratio.figure}, to {ratio.against}",
            f"{'≥' if ratio.at_least else '≤'} {number(ratio.target or 0.0)}",
            f"**{number(ratio.ratio.median)}**",
            _spread(ratio.ratio),
            _verdict(ratio.met) + ("" if ratio.certain else ", but the quartiles differ"),
        )
        for ratio in promised
    ]
    rows += [
        (fact.figure, fact.target, f"**{fact.found}**", "", _verdict(fact.met))
        for fact in found.facts
    ]
    head = ("", "target", "measured", "quartiles", "met")
    return [f"{verdicts.count(True)} of {len(verdicts)} are met.", _table(head, rows)]


def _chapter(found: Findings, chapter: str) -> list[str]:
    timings = [timing for timing in found.timings if timing.chapter == chapter]
    tables = [
        _times([timing for timing in timings if _table_of(timing) == table])
        for table in dict.fromkeys(map(_table_of, timings))
    ]
    rows = [_ratio(ratio) for ratio in found.ratios if ratio.chapter == chapter]
    if rows:
        tables.append(_table(("figure", "", "compared with", "", "ratio", "quartiles"), rows))
    return tables


def _table_of(timing: Timing) -> str:
    """Timings whose columns have the same prefix, such as "kernel: ", make one table."""
    return timing.column.partition(": ")[0]


def _times(timings: list[Timing]) -> str:
    columns = list(dict.fromkeys(timing.column for timing in timings))
    rows: dict[str, dict[str, str]] = {}
    for timing in timings:
        rows.setdefault(timing.row, {})[timing.column] = quantity(timing.seconds.median, "s")
    cells = [(row, *(found.get(column, "") for column in columns)) for row, found in rows.items()]
    head = (_table_of(timings[0]), *(column.partition(": ")[2] for column in columns))
    return _table(head, cells)


def _ratio(ratio: Ratio) -> tuple[str, ...]:
    return (
        ratio.figure,
        quantity(ratio.ours.median, ratio.unit),
        ratio.against,
        quantity(ratio.other.median, ratio.unit),
        f"**{number(ratio.ratio.median)}**",
        _spread(ratio.ratio),
    )


def _spread(ratio: Summary) -> str:
    return "" if ratio.count == 1 else f"{number(ratio.low)} to {number(ratio.high)}"


def _verdict(met: bool | None) -> str:
    return "yes" if met else "**no**"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    return "\n".join(lines)


def quantity(value: float, unit: str) -> str:
    """Returns three significant digits with a unit: "53.1 ms", "4.19 MB"."""
    scales = {
        "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")),
        "B": ((1e6, "MB"), (1e3, "kB"), (1.0, "B")),
    }[unit]
    factor, name = next((scale for scale in scales if abs(value) >= scale[0]), scales[-1])
    return f"{_digits(value / factor)} {name}"


def number(value: float) -> str:
    """Returns a ratio with three significant digits; a small one as a fraction: "1/8"."""
    return f"1/{_digits(1 / value)}" if 0 < value < 0.45 else _digits(value)


def _digits(value: float) -> str:
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    text = f"{value:#.3g}".rstrip(".")
    return text.partition(".")[0] if "." in text and not text.partition(".")[2].strip("0") else text
