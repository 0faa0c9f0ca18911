"""Tables: what was found out, as Markdown."""

from collections.abc import Callable, Iterable, Iterator

from harness.findings import Fact, Findings, Point, Ratio, Timing
from harness.measure import Summary
from harness.names import floor_of, peer_of

from report.chart_specs import Chart, charts_of
from report.evidence import Evidence, compared, is_promise
from report.matrix import matrix
from report.notation import count, number, quantity, size, table

RATIO_HEAD = ("figure", "", "compared with", "", "ratio", "quartiles")
#: How a chart is embedded in a page.
Embed = Callable[[Chart], str]


def whole(evidence: Evidence, embed: Embed) -> str:
    """Returns everything: runs, targets, peers, and each chapter with its charts."""
    parts = [
        *runs(evidence),
        "### Targets",
        *targets(evidence),
        "### Beside the peers",
        *beside(evidence),
        "### Chapters",
        *chapters(evidence, embed, "####"),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def chapters(evidence: Evidence, embed: Embed, heading: str) -> Iterator[str]:
    """Yields every chapter with its charts and tables, what is missing, and what it took."""
    for name in evidence.chapters():
        ratios = list(evidence.ratios(name))
        beside_itself = [ratio for ratio in ratios if not peer_or_floor(ratio)]
        yield f"{heading} {evidence.title(name)}"
        yield from chapter(evidence, name, embed, beside_itself)
        if len(beside_itself) < len(ratios):
            yield "The ratios to peers and floors are in *Beside the peers*."
    yield from (f"{heading} Not measured here", *missing(evidence))
    yield from (f"{heading} What it took", *took(evidence))


def summary(evidence: Evidence) -> Iterator[str]:
    """Yields what is printed after a run: peers, targets, what is missing, and what it took."""
    yield from ("### Beside the peers", *beside(evidence))
    for name in evidence.chapters():
        if grid := matrix(evidence.facts(name)):
            yield from (f"#### {evidence.title(name)}", grid)
    yield from ("### Not measured here", *missing(evidence))
    yield from ("### What it took", *took(evidence))
    yield from ("### Targets", *targets(evidence), "")


# -- where figures come from -----------------------------------------------------------------------


def runs(evidence: Evidence) -> Iterator[str]:
    """Yields the source of each run, in full."""
    for run, name in zip(evidence.runs, evidence.files, strict=True):
        label = f"Run {evidence.number(run)}: m" if len(evidence.runs) > 1 else "M"
        yield f"{label}{_source(run, name)[1:]}"


def _source(run: Findings, name: str) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in run.machine.items())
    versions = ", ".join(f"{name} {value}" for name, value in run.versions.items())
    return (
        f"Measured on {run.date} by `{run.command}`; all figures are in `bench/results/{name}`.\\\n"
        f"Machine: {machine}.\\\nVersions: {versions}."
    )


def source_line(evidence: Evidence, chapters: Iterable[str], more: str = "") -> str:
    """Returns one line: who measured it, when, by what, on what; `more` ends it."""
    of = evidence.chapters()
    used = dict.fromkeys(evidence.number(of[name]) for name in chapters)
    lines: list[str] = []
    for position in used:
        run, name = evidence.runs[position - 1], evidence.files[position - 1]
        versions = ", ".join(
            f"{package} {run.versions[package]}"
            for package in ("Python", "kcache-cuda", "nvidia-cuda-nvrtc", "cuda-core")
            if package in run.versions
        )
        lines.append(
            f"Measured on {run.date} by `{run.command}` (`bench/results/{name}`): {versions}; "
            f"{run.machine.get('CPU', 'unknown CPU')}, {run.machine.get('cores', '?')} cores."
        )
    return " ".join([*lines, *([more] if more else [])])


# -- targets ---------------------------------------------------------------------------------------


def targets(evidence: Evidence, *, missed: bool = False) -> Iterator[str]:
    """Yields how many targets are met, and a table of all of them, or of those that are missed."""
    ratios = [ratio for ratio in evidence.ratios() if ratio.target is not None]
    facts = [fact for fact in evidence.facts() if is_promise(fact)]
    verdicts = [*(ratio.met for ratio in ratios), *(fact.met for fact in facts)]
    rows = [*map(_target, ratios), *map(_promise, facts)]
    if not rows:
        yield "No chapter with a target was run."
        return
    of = evidence.chapters()
    chapters = [*(ratio.chapter for ratio in ratios), *(fact.chapter for fact in facts)]
    # In the order of the chapters, so that related rows stand together.
    order = sorted(range(len(rows)), key=lambda n: list(of).index(chapters[n]))
    yield f"{verdicts.count(True)} of {len(verdicts)} targets are met."
    told = [n for n in order if not missed or not verdicts[n]]
    if told:
        yield table(
            ("", "target", "measured", "quartiles", "met", "chapter"),
            [(*rows[n], f"`{chapters[n]}`{_run(evidence, chapters[n])}") for n in told],
        )


def _run(evidence: Evidence, name: str) -> str:
    if len(evidence.runs) == 1:
        return ""
    return f", run {evidence.number(evidence.chapters()[name])}"


def _target(ratio: Ratio) -> tuple[str, ...]:
    return (
        f"{ratio.figure}, to {ratio.against}",
        f"{'≥' if ratio.at_least else '≤'} {number(ratio.target or 0.0)}",
        f"**{number(ratio.ratio.median)}**",
        _spread(ratio.ratio),
        _verdict(ratio.met) + ("" if ratio.certain else ", but the quartiles differ"),
    )


def _promise(fact: Fact) -> tuple[str, ...]:
    return (fact.figure, fact.target, f"**{fact.found}**", "", _verdict(fact.met))


def _verdict(met: bool | None) -> str:
    return "yes" if met else "**no**"


# -- peers -----------------------------------------------------------------------------------------


def beside(evidence: Evidence, heading: str = "####") -> Iterator[str]:
    """Yields a table of ratios for each peer and each floor."""
    groups: dict[str, list[Ratio]] = {}
    for ratio in evidence.ratios():
        if who := peer_or_floor(ratio):
            groups.setdefault(who, []).append(ratio)
    if groups:
        yield (
            "A ratio is the figure of kcache divided by the figure of the peer. A ratio below 1 "
            "means that kcache takes less time or memory. Where the table says *theirs to ours*, "
            "the ratio is the other way round, and a ratio above 1 means that kcache takes less. "
            "Of figures per second, a ratio above 1 means that kcache does more."
        )
    for who in sorted(groups, key=lambda who: floor_of(who) is not None):
        yield f"{heading} To {'the floor: ' if floor_of(who) else ''}{who}"
        yield table(RATIO_HEAD, map(ratio_row, groups[who]))


def peer_or_floor(ratio: Ratio) -> str | None:
    """Returns whom a ratio compares us with; None where it compares us with ourselves."""
    return peer_of(ratio.against) or floor_of(ratio.against)


# -- one chapter -----------------------------------------------------------------------------------


def chapter(evidence: Evidence, name: str, embed: Embed, ratios: list[Ratio]) -> list[str]:
    """Returns a chapter's command, charts and tables, with those ratios."""
    run = _run(evidence, name)
    parts = [f"`python bench/ratios.py --only {name}`{run}"]
    took = evidence.chapters()[name].took.get(name)
    if took and took.error:
        parts.append(
            f"**This chapter failed**, and what follows is what it had found: {took.error}"
        )
    parts += map(embed, charts_of(evidence, name))
    parts += lines_tables(list(evidence.points(name)))
    parts += time_tables(list(evidence.timings(name)))
    if ratios:
        parts.append(table(RATIO_HEAD, map(ratio_row, ratios)))
    facts = list(evidence.facts(name))
    parts.append(matrix(facts))
    alone = [fact for fact in facts if compared(fact) is None]
    if alone:
        parts.append(table(("", "found"), [(fact.figure, fact.found) for fact in alone]))
    return [part for part in parts if part]


def time_tables(timings: list[Timing]) -> Iterator[str]:
    """Yields a table for each set of timings whose columns have the same prefix."""
    for name in dict.fromkeys(map(prefix, timings)):
        those = [timing for timing in timings if prefix(timing) == name]
        columns = list(dict.fromkeys(timing.column for timing in those))
        rows: dict[str, dict[str, str]] = {}
        for timing in those:
            rows.setdefault(timing.row, {})[timing.column] = quantity(timing.seconds.median, "s")
        cells = [(row, *(found.get(c, "") for c in columns)) for row, found in rows.items()]
        yield table((name, *(column.partition(": ")[2] for column in columns)), cells)


def prefix(timing: Timing) -> str:
    """Timings whose columns have the same prefix, such as "kernel: ", make one table."""
    return timing.column.partition(": ")[0]


def lines_tables(points: list[Point]) -> Iterator[str]:
    """Yields a table for each chart of points: a row for each series, a column for each x."""
    for chart in dict.fromkeys(point.chart for point in points):
        those = [point for point in points if point.chart == chart]
        columns = sorted({point.x for point in those})
        rows: dict[str, dict[float, str]] = {}
        for point in those:
            rows.setdefault(point.series, {})[point.x] = quantity(point.y.median, point.unit)
        axis = those[0].x_name
        text = size if axis == "bytes" else count
        head = (f"{chart}; {axis}:", *map(text, columns))
        yield table(
            head, [(name, *(row.get(x, "") for x in columns)) for name, row in rows.items()]
        )


def ratio_row(ratio: Ratio) -> tuple[str, ...]:
    turned = ratio.at_least and ratio.unit != "1/s"  # see `findings.Ratio`
    return (
        ratio.figure,
        quantity(ratio.ours.median, ratio.unit),
        ratio.against,
        quantity(ratio.other.median, ratio.unit),
        f"**{number(ratio.ratio.median)}**{', theirs to ours' if turned else ''}",
        _spread(ratio.ratio),
    )


def _spread(ratio: Summary) -> str:
    return "" if ratio.count == 1 else f"{number(ratio.low)} to {number(ratio.high)}"


# -- what is not there, and what it took -----------------------------------------------------------


def missing(evidence: Evidence) -> Iterator[str]:
    """Yields what could not be measured here, each with the reason."""
    rows = [(each.who, f"`{each.chapter}`", each.reason) for each in evidence.absent()]
    yield table(("who or what", "chapter", "why"), rows) if rows else "Everything was measured."


def took(evidence: Evidence) -> Iterator[str]:
    """Yields the time of each chapter, and how busy the machine was before and after it."""
    rows = [
        (f"`{name}`{_run(evidence, name)}", f"{each.seconds:.0f} s", before_after, each.error)
        for name, run in evidence.chapters().items()
        if (each := run.took.get(name))
        for before_after in [f"{each.load_before}, {each.load_after}"]
    ]
    if rows:
        yield table(("chapter", "time", "load before, after", "failed"), rows)
