"""Charts: bars, areas, a ring and a meter as SVG. Sizes are in percent, so text is not scaled.

To a screen reader, each chart is one image with a label that says what it shows. When the mouse
points at a part, `<title>` shows its figures. Colours are classes. The style sheet gives each a
value for light and for dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kcache.cli.html_report.markup import Node, el

__all__ = ["Bar", "area", "bars", "meter", "ring", "swatch", "track"]

#: How many labels stand below a chart.
_LABELS = 5
#: The share of its column that a bar fills at most.
_FILLED = 0.74
#: The shortest length of a bar whose value is not 0, in percent. A card on a phone is 310 pixels
#: wide, so this is 4 pixels. The gaps between the parts of a meter take 1.5 of them, and 2.5 are
#: left.
_VISIBLE = 1.3


#: Possible ends of a scale. Their halves are short numbers, too.
_STEPS = (1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10)


class Bar(NamedTuple):
    """One column of a chart.

    Attributes:
        label: short, for the axis.
        title: the text when the mouse points at it.
        parts: (class, value), from the bottom up.
    """

    label: str
    title: str
    parts: Sequence[tuple[str, float]]


def bars(label: str, columns: Sequence[Bar], unit: str) -> Node:
    """Return stacked bars over a scale; screen readers read `label`."""
    top = _ceiling(max(sum(value for _, value in column.parts) for column in columns))
    width = 100 / len(columns)
    plot = _plot(label)
    for number, column in enumerate(columns):
        group = el("g", el("title", column.title), class_="place")
        group.append(el("rect", class_="hover", **_box(number * width, 0, width, 100)))
        base = 0.0
        heights = _lengths([value / top for _, value in column.parts])
        for (name, _), height in zip(column.parts, heights, strict=True):
            if height:
                left = (number + (1 - _FILLED) / 2) * width
                box = _box(left, 100 - base - height, _FILLED * width, height)
                group.append(el("rect", class_=name, **box))
                base += height
        plot.append(group)
    return _framed(plot, top, unit, [column.label for column in columns])


def area(label: str, columns: Sequence[Bar], unit: str) -> Node:
    """Return one value of each column as a line with its area below, likewise."""
    values = [column.parts[0][1] for column in columns]
    name = columns[0].parts[0][0]
    top = _ceiling(max(values))
    last = max(1, len(values) - 1)
    points = [f"{100 * n / last:.2f} {100 - 100 * v / top:.2f}" for n, v in enumerate(values)]
    line = "M" + "L".join(points)
    plot = _plot(label)
    plot.append(
        el(
            "svg",
            el("path", class_=f"{name} area", d=f"{line}L100 100L0 100Z"),
            el("path", class_=f"{name} line", d=line, vector_effect="non-scaling-stroke"),
            viewBox="0 0 100 100",
            preserveAspectRatio="none",
            width="100%",
            height="100%",
            overflow="visible",
        )
    )
    width = 100 / len(columns)
    for number, column in enumerate(columns):
        box = _box(number * width, 0, width, 100)
        plot.append(el("g", el("title", column.title), el("rect", class_="hover", **box)))
    return _framed(plot, top, unit, [column.label for column in columns])


def ring(label: str, share: float, text: str) -> Node:
    """Return a ring, filled by `share`, with a text inside."""
    filled = max(0.0, min(100.0, 100 * share))
    circle = {"cx": "50", "cy": "50", "r": "42", "pathLength": "100"}
    return el(
        "svg",
        el("circle", class_="rest", **circle),
        el(
            "circle",
            class_="filled",
            stroke_dasharray=f"{filled:.2f} 100",
            transform="rotate(-90 50 50)",
            **circle,
        )
        if filled
        else None,
        el("text", text, x=50, y=50, dy="0.36em", text_anchor="middle"),
        class_="ring",
        viewBox="0 0 100 100",
        role="img",
        aria_label=label,
    )


def meter(label: str, parts: Sequence[tuple[str, str, float]]) -> Node:
    """Return one bar from nothing to full, of parts: (class, title, share of the whole)."""
    plot = el("svg", class_="meter", role="img", aria_label=label, width="100%")
    left = 0.0
    lengths = _lengths([share for _, _, share in parts])
    for (name, title, _), width in zip(parts, lengths, strict=True):
        if width:
            box = _box(left, 0, width, 100)
            plot.append(el("g", el("title", title), el("rect", class_=name, **box)))
            left += width
    return plot


def track(name: str, share: float) -> Node:
    """Return a small bar below a name in a table, whose figures stand beside it."""
    filled = _box(0, 0, max(_VISIBLE, min(100.0, 100 * share)), 100)
    return el(
        "svg",
        el("rect", class_="rest", rx=3, **_box(0, 0, 100, 100)),
        el("rect", class_=name, rx=3, **filled),
        class_="track",
        width="100%",
        aria_hidden="true",
    )


def swatch(name: str) -> Node:
    """Return a patch of colour, for a legend."""
    box = el("rect", class_=name, rx=3, width=12, height=12)
    return el("svg", box, class_="swatch", width=12, height=12, aria_hidden="true")


def _plot(label: str) -> Node:
    lines = (el("line", x1="0", x2="100%", y1=y, y2=y) for y in ("0%", "50%", "100%"))
    grid = el("g", *lines, class_="grid")
    return el("svg", grid, class_="plot", role="img", aria_label=label)


def _framed(plot: Node, top: float, unit: str, labels: Sequence[str]) -> Node:
    """Return a plot with a scale at its left, and labels below."""
    ticks = (f"{_number(top * share)}{unit if share else ''}" for share in (1, 0.5, 0))
    scale = el("div", *(el("span", tick) for tick in ticks), class_="scale", aria_hidden="true")
    axis = el("svg", class_="axis", width="100%", height=18, aria_hidden="true")
    last = len(labels) - 1
    for number in sorted({round(n * last / (_LABELS - 1)) for n in range(_LABELS)}):
        label = {0: ("0%", "start"), last: ("100%", "end")}.get(
            number, (f"{100 * (number + 0.5) / len(labels):.2f}%", "middle")
        )
        inner = "" if number in (0, last) else " inner"
        axis.append(
            el(
                "text",
                labels[number],
                class_=f"tick{inner}",
                x=label[0],
                y=14,
                text_anchor=label[1],
            )
        )
    return el("div", scale, plot, axis, class_="frame")


def _box(x: float, y: float, width: float, height: float) -> dict[str, str]:
    named = {"x": x, "y": y, "width": width, "height": height}
    return {name: f"{value:.2f}%" for name, value in named.items()}


def _ceiling(value: float) -> float:
    """Return a round number that is not below a value, and whose half is round, too."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in _STEPS if step * power >= value * 0.999999)


def _lengths(shares: Sequence[float]) -> list[float]:
    """Return the lengths of the parts of a bar in percent, 100 at most together.

    Every part that is not zero is visible; the larger parts make room for it.
    """
    lengths = [max(_VISIBLE, 100 * share) if share > 0 else 0.0 for share in shares]
    over = sum(lengths) - 100
    if over <= 0:
        return lengths
    spare = sum(max(0.0, length - _VISIBLE) for length in lengths)
    kept = max(0.0, 1 - over / spare) if spare else 1.0
    return [min(length, _VISIBLE + (length - _VISIBLE) * kept) for length in lengths]


def _number(value: float) -> str:
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:g}{suffix}"
    return f"{value:g}"
