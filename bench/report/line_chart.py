"""Line chart: figures against a number, with the quartiles as a band."""

from typing import TYPE_CHECKING, Any

from report.axes import FONT, framed, is_wide, round_figures
from report.chart_specs import Chart, Series
from report.notation import quantity, scale, size
from report.palette import PAPER, Pen

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Of the plot, in points; and its margins left, right and below.
HEIGHT = 205.0
SIDES = (50.0, 10.0, 34.0)


def draw_lines(chart: Chart, theme: str, pens: dict[str, Pen]) -> "Figure":
    """Draws a line with its quartiles for each series."""
    from matplotlib.lines import Line2D

    handles: dict[str, Any] = {
        name: Line2D([], [], color=pen.colour, marker=pen.marker, ls=pen.style, ms=4.5, lw=1.5)
        for name, pen in pens.items()
    }
    figure, axes = framed(chart, theme, HEIGHT, SIDES, handles)
    for each in reversed(chart.series):  # our lines are above the others
        _line(axes, each, pens[each.name])
    _across(axes, chart, theme)
    _upward(axes, chart)
    axes.grid(visible=True, axis="y", color=PAPER[theme][3], lw=0.7)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return figure


def _line(axes: "Axes", series: Series, pen: Pen) -> None:
    xs = [float(mark.at) for mark in series.marks]
    figures = [mark.figure for mark in series.marks]
    axes.fill_between(
        xs, [f.low for f in figures], [f.high for f in figures], color=pen.colour, alpha=0.16, lw=0
    )
    ys = [f.median for f in figures]
    axes.plot(xs, ys, color=pen.colour, marker=pen.marker, ls=pen.style, ms=4.5, lw=1.5)


def _across(axes: "Axes", chart: Chart, theme: str) -> None:
    """Puts a tick at each place where there are figures, and says what it counts."""
    xs = sorted({float(mark.at) for each in chart.series for mark in each.marks})
    if xs[0] > 0 and xs[-1] / xs[0] >= 4:
        axes.set_xscale("log")
    text = size if chart.axis == "bytes" else compact
    axes.set_xticks(xs, [text(x) for x in xs])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(chart.axis, color=PAPER[theme][2], fontsize=FONT)


def _upward(axes: "Axes", chart: Chart) -> None:
    figures = [mark.figure for each in chart.series for mark in each.marks]
    if not is_wide(chart):
        axes.set_ylim(0, max(f.high for f in figures) * 1.08)
        top = scale(max(f.median for f in figures), chart.unit)
        axes.yaxis.set_major_formatter(lambda y, _: f"{y / top[0]:g} {top[1]}" if y else "0")
        return
    axes.set_yscale("log")
    low, high = min(f.median for f in figures), max(f.median for f in figures)
    axes.set_ylim(low / 1.6, high * 1.6)
    ticks = round_figures(low / 1.6, high * 1.6, chart.unit)
    axes.set_yticks(ticks, [quantity(tick, chart.unit) for tick in ticks])
    axes.set_yticks([], minor=True)


def compact(value: float) -> str:
    """Returns a count in few letters: "100", "10k", "1M"."""
    for factor, name in ((1_000_000, "M"), (1_000, "k")):
        if value >= factor:
            return f"{value / factor:g}{name}"
    return f"{value:g}"
