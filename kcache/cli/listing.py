"""Listing: shows entries as a table that fits the terminal, and as JSON."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kcache.cli.terminal import columns, width
from kcache.nvrtc.inventory import DAMAGED, KERNEL, UNREADABLE, Item
from kcache.util.units import format_age, format_size, format_time

__all__ = ["item_json", "listing", "what_it_is"]

#: Columns that only a terminal of so many columns shows, so that a kernel's name has room.
_NEEDS = {"COMPILE": 100, "AGE": 90, "USED": 70, "SIZE": 60, "ARCH": 50}


def listing(items: Sequence[Item], digits: int, now: float, *, used: bool = True) -> str:
    """Return one line per entry, which fits the terminal if there is one.

    If two kernels have the same source name, names and target, the options that differ stand behind
    the name.

    Args:
        items: at least one, in their order.
        digits: how many of a key to show.
        now: seconds since the epoch.
        used: whether to show when each was last used.
    """
    room = width()
    short = items if room is None else map(_without_folder, items)
    names = zip(map(what_it_is, short), _differences(items), strict=True)
    table = {
        "KEY": [item.key[:digits] for item in items],
        "SIZE": [format_size(item.size) for item in items],
        "AGE": ["-" if item.created is None else format_age(now - item.created) for item in items],
        "USED": [format_age(now - item.used) for item in items],
        "COMPILE": [
            "-" if item.compile_seconds is None else format_time(item.compile_seconds)
            for item in items
        ],
        "ARCH": [item.arch or "-" for item in items],
        "KERNEL": [f"{name}  {more}" if more else name for name, more in names],
    }
    if not used:
        del table["USED"]
    shown = [head for head in table if room is None or room >= _NEEDS.get(head, 0)]
    rows = zip(*(table[head] for head in shown), strict=True)
    return columns([tuple(shown), *rows], fit=True)


def _without_folder(item: Item) -> Item:
    return item._replace(source_name=os.path.basename(item.source_name))


def what_it_is(item: Item) -> str:
    """Return what an entry holds, in one line."""
    if item.kind == KERNEL:
        return item.title or "-"
    if item.kind in (DAMAGED, UNREADABLE):
        return f"({item.kind}: {item.problem})"
    return f"({item.problem or item.kind})"


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


def _differences(items: Sequence[Item]) -> list[str]:
    """Return, for each entry, the options and the compiler that differ from others of its name."""
    facts = [(*item.flags, f"({item.compiler})") if item.compiler else item.flags for item in items]
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, item in enumerate(items):
        if item.kind == KERNEL:
            groups.setdefault((item.source_name, item.names, item.arch), []).append(number)
    found = [""] * len(items)
    for numbers in groups.values():
        common = set(facts[numbers[0]]).intersection(*(facts[number] for number in numbers))
        for number in numbers:
            own = " ".join(each for each in facts[number] if each not in common)
            found[number] = f"[{own}]" if own else ""
    return found
