"""Over time: makes the charts of the last 90 days."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import tzinfo
from itertools import accumulate

from kcache.cli.html_report import charts
from kcache.cli.html_report.charts import Bar
from kcache.cli.html_report.markup import Node, el
from kcache.cli.html_report.pieces import NONE, card, number_of, table
from kcache.cli.html_report.snapshot import Snapshot
from kcache.cli.html_report.timeline import Span, days, last_hours
from kcache.util.units import format_time

__all__ = ["over_time"]

#: Units of saved time, in seconds; the largest that fits is taken.
_UNITS = ((3600.0, " h"), (60.0, " min"), (1.0, " s"))


def over_time(snapshot: Snapshot, zone: tzinfo | None) -> tuple[Node, ...]:
    """Return the charts of the days and of the last hours, or one card that says there are none."""
    spans = days(snapshot.hours, snapshot.written, zone)
    if not spans:
        text = "Nothing was counted in the last 90 days. Processes add their counts when they end."
        return (card("Over time", el("p", text, class_="empty"), wide=True),)
    hours = last_hours(snapshot.hours, snapshot.written, zone)
    by_day = _requests("Hits and misses by day", spans, "Day", wide=True)
    if not hours:
        return by_day, _saved(spans, wide=True)
    return by_day, _saved(spans), _requests("The last 48 hours", hours, "Hour")


def _requests(title: str, spans: Sequence[Span], what: str, *, wide: bool = False) -> Node:
    hits, misses = sum(s.hits for s in spans), sum(s.misses for s in spans)
    said = f"{number_of(int(hits), 'hit')} and {number_of(int(misses), 'miss', 'misses')}"
    busiest = max(spans, key=lambda span: span.requests)
    label = (
        f"{title}: {said} from {spans[0].title} to {spans[-1].title}. Most requests: "
        f"{busiest.requests:,.0f}, {busiest.title}. The table below has every figure."
    )
    columns = [
        Bar(span.label, _told(span), (("hits", span.hits), ("misses", span.misses)))
        for span in spans
    ]
    legend = el(
        "p",
        charts.swatch("hits"),
        el("span", f"{number_of(int(hits), 'hit')}"),
        charts.swatch("misses"),
        el("span", f"{number_of(int(misses), 'miss', 'misses')}"),
        class_="legend",
    )
    rows = [
        (
            el("th", span.title, scope="row"),
            *(el("td", f"{n:,.0f}") for n in (span.hits, span.misses, span.evictions)),
            el("td", format_time(span.saved_seconds) if span.saved_seconds else NONE),
        )
        for span in spans
        if span.requests or span.evictions
    ]
    head = ((what, ""), ("Hits", ""), ("Misses", ""), ("Evictions", ""), ("Saved", ""))
    caption = f"{title}; left out where nothing was counted"
    figures = el("details", el("summary", "The figures"), table(caption, head, rows))
    return card(title, legend, charts.bars(label, columns, ""), figures, wide=wide)


def _saved(spans: Sequence[Span], *, wide: bool = False) -> Node:
    sums = list(accumulate(span.saved_seconds for span in spans))
    scale, unit = next((s, u) for s, u in _UNITS if sums[-1] >= 2 * s or s == 1)
    columns = [
        Bar(
            span.label,
            f"Until {span.title}: {format_time(total)} saved",
            (("saved", total / scale),),
        )
        for span, total in zip(spans, sums, strict=True)
    ]
    said = f"{format_time(sums[-1])} since {spans[0].label}"
    spent = format_time(sum(span.compile_seconds for span in spans))
    return card(
        "Compile time saved",
        el("p", f"{said}, for {spent} of compiling.", class_="legend"),
        charts.area(f"Compile time saved, summed up by day: {said}.", columns, unit),
        wide=wide,
    )


def _told(span: Span) -> str:
    saved = f", {format_time(span.saved_seconds)} saved" if span.saved_seconds else ""
    return (
        f"{span.title}: {number_of(int(span.hits), 'hit')}, "
        f"{number_of(int(span.misses), 'miss', 'misses')}{saved}"
    )
