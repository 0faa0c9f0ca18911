"""Bar chart: figures by name, each with its figure at its end."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from report.axes import FONT, LINE, framed, is_wide, round_figures
from report.chart_specs import Chart, Mark, Series, plain
from report.notation import quantity, scale
from report.palette import PAPER, Pen

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: In points: a bar and the space between groups; the plot's margins left, right and below.
BAR, GAP = 11.0, 6.0
SIDES = (10.0, 42.0, 20.0)


def draw_bars(chart: Chart, theme: str, pens: dict[str, Pen]) -> "Figure":
    """Draws a group of bars for each label, and each bar's figure at its end.

    A chart of one group has the names of its bars above them, and no legend.
    """
    from matplotlib.patches import Patch

    paper, _, faint, grid = PAPER[theme]
    alone = chart.groups() == [""]
    handles: dict[str, Any] = {
        each.name: Patch(
            facecolor=pens[each.name].colour, edgecolor=paper, hatch=_hatch(each), lw=0
        )
        for each in chart.series
    }
    rows = list(_rows(chart, alone=alone))
    plot = rows[-1].y + BAR + GAP
    figure, axes = framed(chart, theme, plot, SIDES, {} if alone else handles)
    figures = [mark.figure.median for each in chart.series for mark in each.marks]
    low = _outward(axes, chart, figures)
    axes.set_ylim(plot, 0)
    for row in rows:
        _row(axes, row, low=low, unit=chart.unit, theme=theme, pen=pens[row.series.name])
    axes.set_yticks([])
    axes.grid(visible=True, axis="x", color=grid, lw=0.7)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(axis="x", labelcolor=faint)
    return figure


@dataclass(frozen=True, slots=True)
class Row:
    """One bar: its upper edge in points, and what is written above it, if anything."""

    y: float
    label: str
    series: Series
    mark: Mark


def _rows(chart: Chart, *, alone: bool) -> Iterator[Row]:
    y = 0.0
    for group in chart.groups():
        first = True
        for each in chart.series:
            for mark in (mark for mark in each.marks if mark.at == group):
                label = each.name if alone else group if first else ""
                y += LINE if label else 0.0
                yield Row(y, label, each, mark)
                y += BAR
                first = False
        y += GAP


def _row(axes: "Axes", row: Row, *, low: float, unit: str, theme: str, pen: Pen) -> None:
    paper, ink = PAPER[theme][:2]
    value = row.mark.figure.median
    axes.barh(
        row.y + BAR / 2,
        value - low,
        height=BAR - 2,
        left=low,
        color=pen.colour,
        hatch=_hatch(row.series),
        edgecolor=paper,
        lw=0,
    )
    axes.annotate(plain(row.label), (low, row.y - 3), color=ink)
    axes.annotate(
        quantity(value, unit),
        (value, row.y + BAR / 2),
        xytext=(3, 0),
        textcoords="offset points",
        va="center",
        color=ink,
        fontsize=FONT - 0.5,
        annotation_clip=False,
    )


def _hatch(series: Series) -> str:
    """Peers are told by more than their colour."""
    return "////" if series.role == "peer" else ""


def _outward(axes: "Axes", chart: Chart, figures: list[float]) -> float:
    """Scales the axis along the bars; returns where they start."""
    high = max(figures)
    if not is_wide(chart):
        axes.set_xlim(0, high)
        factor, name = scale(high, chart.unit)
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / factor:g} {name}" if x else "0")
        return 0.0
    low: float = 10.0 ** math.floor(math.log10(min(figures)) - 0.3)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    ticks = round_figures(low, high, chart.unit)
    ticks = ticks[:: max(1, math.ceil(len(ticks) / 5))]
    axes.set_xticks(ticks, [quantity(tick, chart.unit) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.get_xticklabels()[0].set_horizontalalignment("left")  # so that no label is cut off
    return low
