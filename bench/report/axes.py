"""Axes: what every chart has around its plot: title, axes and legend."""

import math
import textwrap
from typing import TYPE_CHECKING, Any

from report.chart_specs import Chart, plain
from report.notation import SCALES
from report.palette import PAPER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Points of 1/72 inch; 4 of 3 CSS pixels.
WIDTH = 315.0
FONT = 9.0
LINE = 13.0
TOP = 8.0


def framed(
    chart: Chart,
    theme: str,
    plot: float,
    sides: tuple[float, float, float],
    handles: dict[str, Any],
) -> "tuple[Figure, Axes]":
    """Returns a figure with a title above the plot and the legend below.

    `plot` is the height of the plot, `sides` its margins left, right and below, all in points.
    """
    from matplotlib.figure import Figure

    paper, ink, faint, grid = PAPER[theme]
    left, right, bottom = sides
    title = textwrap.wrap(plain(chart.title), 48)
    columns = 2 if max(map(len, handles), default=0) <= 24 else 1
    below = LINE * math.ceil(len(handles) / columns) + 6 if handles else 0.0
    above = TOP + LINE * (len(title) + 1) + 6
    height = above + plot + bottom + below
    figure = Figure(figsize=(WIDTH / 72, height / 72))
    axes = figure.add_axes(
        (left / WIDTH, (below + bottom) / height, (WIDTH - left - right) / WIDTH, plot / height)
    )
    for number, line in enumerate(title):
        y = 1 - (TOP + LINE * (number + 0.8)) / height
        figure.text(8 / WIDTH, y, line, color=ink, fontsize=FONT + 1, fontweight="bold")
    y = 1 - (TOP + LINE * (len(title) + 0.8)) / height
    figure.text(8 / WIDTH, y, _what(chart), color=faint, fontsize=FONT)
    if handles:
        figure.legend(
            handles.values(),
            [plain(name) for name in handles],
            loc="lower left",
            bbox_to_anchor=(0.0, 2 / height),
            ncols=columns,
            frameon=False,
            labelcolor=ink,
            fontsize=FONT,
            handlelength=2.6,
            columnspacing=1.2,
            labelspacing=0.3,
            borderpad=0.1,
        )
    axes.set_facecolor(paper)
    axes.tick_params(colors=faint, labelcolor=ink, length=0, pad=4)
    for side in axes.spines.values():
        side.set_color(grid)
    axes.set_axisbelow(True)
    return figure, axes


def _what(chart: Chart) -> str:
    """Returns what the figures are, and which way is better."""
    names = {"s": "time", "B": "bytes", "1/s": "operations per second", "": "count"}
    name = names.get(chart.unit, chart.unit)
    better = "more is better" if chart.unit == "1/s" else "less is better"
    return f"{name}, {'logarithmic, ' if is_wide(chart) else ''}{better}"


def is_wide(chart: Chart) -> bool:
    """Whether the figures span so much that only a logarithmic axis shows them all."""
    figures = [mark.figure.median for each in chart.series for mark in each.marks]
    return min(figures) > 0 and max(figures) / min(figures) >= 12


def round_figures(low: float, high: float, unit: str) -> list[float]:
    """Returns figures between two others to put ticks at: 1, 10, 100, or 1, 2, 5, 10 if few."""
    smallest = SCALES.get(unit, ((1.0, unit),))[-1][0]
    first, last = math.floor(math.log10(low / smallest)), math.ceil(math.log10(high / smallest))
    steps = (1, 2, 5) if math.log10(high / low) < 2 else (1,)
    ticks = [smallest * step * 10**n for n in range(first, last + 1) for step in steps]
    return [float(f"{tick:.6g}") for tick in ticks if low <= tick <= high]
