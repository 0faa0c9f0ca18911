"""Pieces: the elements that all sections of the page use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import tzinfo

from kcache.cli.html_report.markup import Node, el
from kcache.util.units import counted, local_time

__all__ = ["NONE", "TIMES", "card", "cut", "date", "number_of", "table"]

#: The text for a missing figure, and the sign of a factor.
NONE, TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"
#: A longer name is cut in the middle. So the page stays small, and both ends tell names apart.
_LONGEST = 120


def card(title: str, *children: Node | None, wide: bool = False) -> Node:
    """Return a box with a title; a wide one takes the whole width."""
    return el("section", el("h2", title), *children, class_="card wide" if wide else "card")


def table(caption: str, head: Sequence[tuple[str, str]], rows: Iterable[tuple[Node, ...]]) -> Node:
    """Return a table; `head` is (text, class) of each column."""
    titles = (
        el("th", text, scope="col", class_=name) if name else el("th", text, scope="col")
        for text, name in head
    )
    body = el("tbody", *(el("tr", *row) for row in rows))
    return el("table", el("caption", caption), el("thead", el("tr", *titles)), body)


def cut(text: str) -> str:
    """Return a name; a long one loses its middle."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]}…{text[-_LONGEST // 2 :]}"


def number_of(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, such as `"1,204 entries"`."""
    return counted(count, noun, plural or f"{noun}s")


def date(seconds: float, zone: tzinfo | None) -> str:
    """Return a time, given in seconds since the epoch, to the minute."""
    moment = local_time(seconds, zone)
    return f"{moment.day} {moment:%B %Y, %H:%M %Z}"
