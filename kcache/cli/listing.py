"""Listing: shows entries as a table that fits the terminal, and as JSON."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from kcache.cli.terminal import cells, columns, cut, fit, plain, width
from kcache.nvrtc.inventory import DAMAGED, KERNEL, UNREADABLE, Item
from kcache.util.units import format_age, format_size, format_time

__all__ = ["item_json", "listing", "what_it_is"]

#: Columns that are left out on a narrow terminal, the first one first, until a kernel's name has
#: room.
_SPARED = ("COMPILE", "AGE", "USED", "SIZE", "ARCH")
#: The width of a kernel's name in terminal columns, if it needs as much.
_READABLE = 30
#: The text between a kernel's name and the options that set it apart from others of this name.
_GAP = "  "


def listing(items: Sequence[Item], digits: int, now: float, *, used: bool = True) -> str:
    """Return one line per entry, which fits the terminal if there is one.

    If two kernels have the same source name, names and target, the options that differ stand behind
    the name. Names that would look the same after cutting are cut in their middle.

    Args:
        items: at least one, in their order.
        digits: how many of a key to show.
        now: seconds since the epoch.
        used: whether to show when each was last used.
    """
    table = {
        "KEY": [item.key[:digits] for item in items],
        "SIZE": [format_size(item.size) for item in items],
        "AGE": [_age(now, item.created) for item in items],
        "USED": [_age(now, item.used) for item in items],
        "COMPILE": [_time(item.compile_seconds) for item in items],
        "ARCH": [plain(item.arch) or "-" for item in items],
    }
    if not used:
        del table["USED"]
    apart = _differences(items)
    short = map(_without_folder, items)
    room = _make_room(table, max(map(cells, map(_joined, map(what_it_is, short), apart))))
    names = [_name(item, room) for item in items]
    lines = [_joined(name, more, room) for name, more in zip(names, apart, strict=True)]
    alike = {line for line, count in Counter(lines).items() if count > 1}
    table["KERNEL"] = [
        _joined(name, more, room, keep_end=True) if line in alike else line
        for name, more, line in zip(names, apart, lines, strict=True)
    ]
    return fit(columns([tuple(table), *zip(*table.values(), strict=True)]))


def _name(item: Item, room: int | None) -> str:
    """Return what an entry holds, without the source's folder if that is too long."""
    whole = what_it_is(item)
    return whole if room is None or cells(whole) <= room else what_it_is(_without_folder(item))


def _without_folder(item: Item) -> Item:
    return item._replace(source_name=os.path.basename(item.source_name))


def _age(now: float, moment: float | None) -> str:
    return "-" if moment is None else format_age(now - moment)


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else format_time(seconds)


def what_it_is(item: Item) -> str:
    """Return what an entry holds, in one printable line."""
    if item.kind == KERNEL:
        names = ", ".join(item.names)
        return plain(f"{item.source_name}: {names}" if names else item.source_name) or "-"
    if item.kind in (DAMAGED, UNREADABLE):
        return f"({item.kind}: {plain(item.problem)})"
    return f"({plain(item.problem) or item.kind})"


def item_json(item: Item) -> dict[str, object]:
    """Return an item in the form that JSON output has: full key, bytes, seconds since the epoch."""
    return {
        "key": item.key,
        "kind": item.kind,
        "problem": item.problem or None,
        "size_bytes": item.size,
        "last_use": item.used,
        "created": item.created,
        "compile_seconds": item.compile_seconds,
        "source_name": item.source_name or None,
        "names": list(item.names),
        "arch": item.arch or None,
        "flags": list(item.flags),
        "compiler": item.compiler or None,
    }


def _make_room(table: dict[str, list[str]], wanted: int) -> int | None:
    """Remove columns until the names have the width that they want; return their width.

    It is None without a terminal, because lines then have no limit.
    """
    whole = width()
    if whole is None:
        return None
    room = whole - sum(_taken(head, texts) for head, texts in table.items())
    for head in _SPARED:
        if room < min(wanted, _READABLE) and head in table:
            room += _taken(head, table.pop(head))
    return max(0, room)


def _taken(head: str, texts: Sequence[str]) -> int:
    return max(map(cells, (head, *texts))) + len(_GAP)


def _joined(name: str, more: str, room: int | None = None, *, keep_end: bool = False) -> str:
    """Return a name and its differences, both cut if there is no room for all."""
    whole = f"{name}{_GAP}{more}" if more else name
    if room is None or cells(whole) <= room:
        return whole
    if not more:
        return cut(name, room, keep_end=keep_end)
    behind = cut(more, max(room // 2, room - cells(name) - len(_GAP)), keep_end=True)
    return f"{cut(name, max(0, room - cells(behind) - len(_GAP)), keep_end=keep_end)}{_GAP}{behind}"


def _differences(items: Sequence[Item]) -> list[str]:
    """Return, for each entry, the options and the compiler that differ from others of its name."""
    facts = [_facts(item) for item in items]
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, item in enumerate(items):
        if item.kind == KERNEL:
            groups.setdefault((item.source_name, item.names, item.arch), []).append(number)
    found = [""] * len(items)
    for numbers in groups.values():
        common = set(facts[numbers[0]]).intersection(*(facts[number] for number in numbers))
        for number in numbers:
            own = " ".join(each for each in facts[number] if each not in common)
            found[number] = f"[{plain(own)}]" if own else ""
    return found


def _facts(item: Item) -> tuple[str, ...]:
    return (*item.flags, f"({item.compiler})") if item.compiler else item.flags
