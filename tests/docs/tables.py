"""The tables of the page about formats, and bytes read by them."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping

from docs.pages import DOCS, blocks

PAGE = DOCS / "reference" / "entry-format.md"
_LINES = PAGE.read_text(encoding="utf-8").splitlines()
_CODES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i64": "q", "f64": "d"}

Row = dict[str, str]
Value = int | float | bytes | str | tuple[float, ...]


def section(heading: str) -> list[str]:
    """Returns the lines below a heading, up to the next one of any level."""
    start = _LINES.index(next(line for line in _LINES if re.fullmatch(rf"#+ {heading}", line)))
    lines, fenced = [], False
    for line in _LINES[start + 1 :]:
        fenced ^= line.startswith("```")
        if line.startswith("#") and not fenced:
            break
        lines.append(line)
    return lines


def tables(heading: str) -> list[list[Row]]:
    """Returns the tables below a heading: each row by the names of the columns."""
    found: list[list[Row]] = []
    head: list[str] = []
    for line in section(heading):
        if not line.startswith("|"):
            head = []
            continue
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if not head:
            head = cells
            found.append([])
        elif set(line) - set("|-"):
            found[-1].append(dict(zip(head, cells, strict=True)))
    return found


def read(table: list[Row], data: bytes) -> tuple[dict[str, Value], bytes]:
    """Returns what a table says of bytes, by field, up to a row whose size it can't tell; the rest.

    Raises:
        AssertionError: a row's offset is not where the row before it ends.
    """
    found: dict[str, Value] = {}
    at = 0
    for row in table:
        length = _size(row["size"], found, len(data) - at)
        if length is None:
            break
        if row.get("offset"):
            assert int(row["offset"]) == at, row
        found[row["field"]] = _value(row["type"], data[at : at + length])
        at += length
    return found, data[at:]


def _size(text: str, found: Mapping[str, Value], rest: int) -> int | None:
    if text.isdecimal():
        return int(text)
    if text == "rest":
        return rest
    known = found.get(text)
    return known if isinstance(known, int) else None


def _value(kind: str, raw: bytes) -> Value:
    if kind == "bytes":
        return raw
    if kind == "text":
        return raw.decode()
    code, _, count = kind.removesuffix("]").partition("[")
    values = struct.unpack(f"<{count}{_CODES[code]}", raw)
    return values if count else values[0]


# -- what the page prints ------------------------------------------------------------------------

_ROW = re.compile(r"^([0-9a-f]{8})  ((?:[0-9a-f]{2} ?)+) *\|")


def dumps(heading: str) -> list[bytes]:
    """Returns the bytes that the examples below a heading print; one item for each `dump`."""
    inside = "\n".join(section(heading))
    (block,) = (b for b in blocks(PAGE) if b.language == "text" and b.text in f"{inside}\n")
    found: list[bytes] = []
    expected = -1
    for line in block.text.splitlines():
        row = _ROW.match(line)
        if row is None:
            expected = -1
            continue
        raw = bytes.fromhex(row[2])
        offset = int(row[1], 16)
        if offset == expected:
            found[-1] += raw
        else:
            found.append(raw)
        expected = offset + 16
    return found
