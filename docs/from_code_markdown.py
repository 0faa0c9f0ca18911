"""Markdown of the reference pages: what a docstring says, and how a table is written."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

REFERENCE = Path(__file__).parent / "reference"
#: A part of a page that comes from the code: its kind and its arguments.
PART = re.compile(r"(<!-- from the code: (\w+)((?: \S+)*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table; the first row is its head."""
    for number, row in enumerate(rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
        if number == 0:
            yield f"|{'---|' * len(row)}"


def plain(text: str) -> str:
    """Returns text as one line of Markdown; what stands between backticks is code already."""
    parts = " ".join(text.split()).split("`")
    parts[::2] = [re.sub(r"(\*|__|<|(?<!\w)\[)", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def sections(of: object) -> dict[str, str]:
    """Returns the parts of a docstring: the text under "", and each section under its title."""
    found = {"": ""}
    title = ""
    for line in (inspect.getdoc(of) or "").splitlines():
        head = re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields):", line)
        if head:
            title = head[1]
            found[title] = ""
        elif title and line and not line.startswith(" "):
            title = ""
            found[""] += f"\n{line}\n"
        else:
            found[title] += f"{line}\n"
    return found


def items(section: str) -> dict[str, str]:
    """Returns what a section says of each name."""
    found = re.findall(r"^ {4}([\w*]+): (.*(?:\n {8}.*|\n(?=\n {8}))*)", section, re.MULTILINE)
    return {name: " ".join(about.split()) for name, about in found}


def first_paragraph(of: object) -> str:
    return " ".join((inspect.getdoc(of) or "").partition("\n\n")[0].split())
