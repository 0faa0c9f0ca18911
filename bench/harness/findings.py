"""Findings: what a benchmark run found out, as values and as JSON; `tables` shows it."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.measure import Rounds, Summary


@dataclass(frozen=True, slots=True)
class Ratio:
    """Two figures taken side by side, and their ratio.

    Attributes:
        chapter: the chapter that measured it.
        figure: what is measured.
        against: what it is compared with.
        unit: "s", "B" or "1/s".
        ours, other: the two figures.
        ratio: ours over other, round by round; for `at_least` other over ours, but of figures
            per second ours over other.
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
        unit: "s", "B" or "1/s"; anything else is a name of what is counted.
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


@dataclass(frozen=True, slots=True)
class Took:
    """How the run of one chapter went.

    Attributes:
        title: the chapter's title.
        seconds: its wall time.
        load_before, load_after: the machine's load average of the last minute.
        error: what ended it early; "" if nothing did.
    """

    title: str
    seconds: float
    load_before: str
    load_after: str
    error: str = ""


@dataclass
class Findings:
    """Everything that was found out, with what it was measured by and on.

    `took` has the chapters that were run, in order, by name.
    """

    date: str
    command: str
    machine: dict[str, str]
    versions: Mapping[str, str]
    ratios: list[Ratio] = field(default_factory=list[Ratio])
    facts: list[Fact] = field(default_factory=list[Fact])
    timings: list[Timing] = field(default_factory=list[Timing])
    points: list[Point] = field(default_factory=list[Point])
    absent: list[Absent] = field(default_factory=list[Absent])
    took: dict[str, Took] = field(default_factory=dict[str, Took])

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
        for values in plain["points"]:
            found.points.append(Point(**{**values, "y": Summary(**values["y"])}))
        found.absent += (Absent(**values) for values in plain["absent"])
        took = plain["took"].items()
        found.took |= {name: Took(**values) for name, values in took}
        return found
