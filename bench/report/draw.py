"""Draw: draws charts as SVG by Matplotlib, for a light and for a dark page.

The same data and the same Matplotlib give the same bytes. Text stays text. A chart is 420 CSS
pixels wide, so that on a phone's 330 its smallest letters have 9 pixels; pages show it larger.
"""

import io
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from report.axes import FONT
from report.bar_chart import draw_bars
from report.chart_specs import Chart
from report.line_chart import draw_lines
from report.palette import PAPER, THEMES, pens_of

SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kcache",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
    "font.size": FONT,
    "axes.unicode_minus": False,
    "hatch.linewidth": 0.8,
}


def write_charts(charts: Mapping[str, Chart], folder: Path) -> list[Path]:
    """Draws charts into `folder`, named after them and their theme; returns the files.

    Raises ImportError without Matplotlib.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for chart in charts.values():
        for theme in THEMES:
            path = folder / f"{chart.name}-{theme}.svg"
            path.write_text(draw(chart, theme), encoding="utf-8")
            files.append(path)
    return files


def draw(chart: Chart, theme: str) -> str:
    """Returns a chart as SVG, with its data's digest in it."""
    import matplotlib as mpl

    with mpl.rc_context(SETTINGS):
        pens = pens_of(chart, theme)
        draw_any = draw_bars if chart.kind == "bars" else draw_lines
        figure = draw_any(chart, theme, pens)
        file = io.StringIO()
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(file, format="svg", metadata=metadata, facecolor=PAPER[theme][0])
    return _stamp(file.getvalue(), chart)


def stamp_of(svg: str) -> str | None:
    """Returns the digest of the data that an SVG was drawn from, or None."""
    _, found, rest = svg.partition("<desc>data: ")
    return rest.partition("<")[0] if found else None


def _stamp(svg: str, chart: Chart) -> str:
    """Adds the title for people who can't see the chart, and the digest."""
    start = svg.index(">", svg.index("<svg ")) + 1
    said = f"<title>{escape(chart.alternative())}</title>\n <desc>data: {chart.digest()}</desc>"
    return f'{svg[: start - 1]} role="img">\n {said}{svg[start:]}'
