"""Notation: figures and tables as text."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

#: Factors and names of units, largest first.
SCALES = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")),
    "B": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
    "1/s": ((1e6, "M/s"), (1e3, "k/s"), (1.0, "/s")),
}


def quantity(value: float, unit: str) -> str:
    """Returns three significant digits with a unit: "53.1 ms", "4.19 MB", "12.3 k/s".

    A unit that has no scales is written as it is: "3 compiles", or "3" where it is "".
    """
    factor, name = scale(value, unit)
    return f"{_digits(value / factor)} {name}".rstrip()


def scale(value: float, unit: str) -> tuple[float, str]:
    """Returns the largest factor that leaves a value at 1 or above, and the unit's name."""
    scales = SCALES.get(unit, ((1.0, unit),))
    return next((scale for scale in scales if abs(value) >= scale[0]), scales[-1])


def number(value: float) -> str:
    """Returns a ratio with three significant digits; a small one as a fraction: "1/8"."""
    return f"1/{_digits(1 / value)}" if 0 < value < 0.45 else _digits(value)


def count(value: float) -> str:
    """Returns what is counted on an axis: "100,000"; bytes are not counted, see `size`."""
    return f"{value:,.0f}"


def size(value: float) -> str:
    """Returns bytes as the sizes that things are given in: "100 KiB", "16 MiB"."""
    for factor, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= factor:
            return f"{value / factor:g} {name}"
    return f"{value:g} B"


def _digits(value: float) -> str:
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    text = f"{value:#.3g}".rstrip(".")
    return text.partition(".")[0] if "." in text and not text.partition(".")[2].strip("0") else text


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table. A figure in a cell of its own stays on the line of its unit."""
    lines = [f"| {' | '.join(map(_cell, cells))} |" for cells in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    return "\n".join(lines)


def _cell(text: str) -> str:
    is_figure = re.fullmatch(r"[\d.,]+ [kMGmun]?[sB/]+", text)
    return text.replace(" ", "\u00a0") if is_figure else text.replace("|", "\\|")


def aligned(markdown: str) -> str:
    """Returns a text for a terminal: its tables in columns, each row on one line."""
    parts: list[str] = []
    for is_table, group in groupby(markdown.splitlines(), lambda line: line.startswith("|")):
        lines = list(group)
        parts += _columns(lines) if is_table else lines
    return "\n".join(parts)


def _columns(lines: list[str]) -> list[str]:
    rows = [
        [cell.strip().replace("**", "").replace("\\|", "|") for cell in _cells(line)]
        for line in lines
    ]
    del rows[1]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [texts[0], "  ".join("-" * width for width in widths), *texts[1:]]


def _cells(line: str) -> list[str]:
    return re.split(r"(?<!\\)\|", line.strip()[1:-1])
