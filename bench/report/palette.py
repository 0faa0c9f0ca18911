"""Palette: the colour, marker and stroke of each series, on light paper and on dark."""

from dataclasses import dataclass
from typing import Any

from harness.names import role_of

from report.chart_specs import Chart

THEMES = ("light", "dark")
#: Paper, ink, faint ink, lines of the grid. The papers are those of the documentation's theme.
PAPER: dict[str, tuple[str, str, str, str]] = {
    "light": ("#ffffff", "#1a1a1a", "#5a5c63", "#e3e4e8"),
    "dark": ("#131416", "#ececec", "#a8abb3", "#303236"),
}
#: Okabe and Ito's colours, which colour-blind people can tell apart, and four of Tol's.
#: https://jfly.uni-koeln.de/color/, https://sronpersonalpages.nl/~pault/
COLOURS = {
    "kcache `file`": ("#0072b2", "#4aa8e0"),
    "kcache `zstd`": ("#56b4e9", "#9ad4f7"),
    "kcache `lmdb`": ("#009e73", "#1fc796"),
    "kcache `zstd+lmdb`": ("#44aa99", "#85d6c8"),
    "kcache memory": ("#332288", "#a99bf0"),
    "cuda.core FileStream": ("#d55e00", "#ff8a33"),
    "cuda.core InMemory": ("#e69f00", "#f2b632"),
    "diskcache": ("#cc79a7", "#e59ac4"),
    "JAX LRUCache": ("#882255", "#d6609a"),
    "SQLite": ("#9a8a00", "#f0e442"),
    "CuPy": ("#6b4c9a", "#b493e0"),
}
#: Colours for other names, by role, in this order.
MORE: dict[str, tuple[tuple[str, str], ...]] = {
    "ours": (
        *(("#0072b2", "#4aa8e0"), ("#56b4e9", "#9ad4f7"), ("#009e73", "#1fc796")),
        *(("#332288", "#a99bf0"), ("#44aa99", "#85d6c8"), ("#004c78", "#c3e4fa")),
    ),
    "peer": (
        *(("#d55e00", "#ff8a33"), ("#e69f00", "#f2b632"), ("#cc79a7", "#e59ac4")),
        *(("#882255", "#d6609a"), ("#9a8a00", "#f0e442"), ("#6b4c9a", "#b493e0")),
    ),
    "floor": (("#8a8d94", "#868a92"), ("#5a5c63", "#b9bcc4"), ("#b0b3ba", "#62656c")),
}
MARKERS = {"ours": "osD^vP", "peer": "XphH*<", "floor": "..."}
STYLES = {"ours": "-", "peer": (0, (4, 2)), "floor": (0, (1, 1.6))}


@dataclass(frozen=True, slots=True)
class Pen:
    """How one series looks."""

    colour: str
    marker: str
    style: Any


def pens_of(chart: Chart, theme: str) -> dict[str, Pen]:
    """Returns how each series of a chart looks, by its name: the same in every chart."""
    side = THEMES.index(theme)
    used = dict.fromkeys(MORE, 0)
    pens: dict[str, Pen] = {}
    for each in chart.series:
        number = used[each.role]
        used[each.role] += 1
        more = MORE[each.role]
        colours = COLOURS.get(each.name, more[number % len(more)])
        marks = MARKERS[each.role]
        # A name with a colour of its own has a marker of its own, too.
        alike = [name for name in COLOURS if role_of(name) == each.role]
        place = alike.index(each.name) if each.name in alike else number
        marker = marks[place % len(marks)]
        pens[each.name] = Pen(colours[side], marker, STYLES[each.role])
    return pens
