"""Listing: kernels as a table of lines, and each as an object of JSON."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from kcache.cli.terminal import columns, fit, plain, width
from kcache.nvrtc.inventory import DAMAGED, KERNEL, UNREADABLE, Item
from kcache.util.units import format_age, format_size, format_time

__all__ = ["item_json", "listing", "what_it_is"]

#: What the last column needs to be readable; other columns leave before it gets less.
_READABLE = 24
#: Columns that leave a narrow terminal, the first one first.
_LEAVING = ("COMPILE", "AGE", "USED", "SIZE")


#: What a column shows of an entry.
_Cell = Callable[[Item], str]


def listing(rows: Sequence[Item], digits: int, now: float, *, used: bool = True) -> str:
    """Return a line per entry, cut to the width of the terminal.

    On a narrow terminal columns are left out before the kernel's name gets unreadable. Kernels that
    are alike but for their options show the options in which they differ.

    Args:
        rows: the entries, in their order.
        digits: how many of a key to show.
        now: seconds since the epoch.
        used: whether there is a latest use to show.
    """
    shown: dict[str, _Cell] = {
        "KEY": lambda item: item.key[:digits],
        "SIZE": lambda item: format_size(item.size),
        "AGE": lambda item: _since(item.created, now),
        "USED": lambda item: format_age(now - item.used),
        "COMPILE": _compile_time,
        "ARCH": lambda item: plain(item.arch) or "-",
    }
    if not used:
        del shown["USED"]
    room = width()
    for head in _LEAVING:
        if room is not None and _taken(shown, rows) + _READABLE > room:
            shown.pop(head, None)
    left = None if room is None else room - _taken(shown, rows)
    differing = _differing(rows)
    lines = [
        (
            *(cell(item) for cell in shown.values()),
            _fitted(item, left) + differing.get(item.key, ""),
        )
        for item in rows
    ]
    return fit(columns([(*shown, "KERNEL"), *lines]))


def _taken(shown: Mapping[str, _Cell], rows: Sequence[Item]) -> int:
    """Return how wide columns are, with the two spaces after each."""
    return sum(
        2 + max(len(head), *(len(cell(item)) for item in rows)) for head, cell in shown.items()
    )


def _since(then: float | None, now: float) -> str:
    return "-" if then is None else format_age(now - then)


def _compile_time(item: Item) -> str:
    return "-" if item.compile_seconds is None else format_time(item.compile_seconds)


def _fitted(item: Item, room: int | None) -> str:
    """Return what an entry is, without the source's directory where that takes too much room."""
    whole = what_it_is(item)
    if room is None or len(whole) <= room or item.kind != KERNEL:
        return whole
    return what_it_is(item._replace(source_name=os.path.basename(item.source_name)))


def _differing(rows: Iterable[Item]) -> dict[str, str]:
    """Return by key the options in which kernels of one name and target differ."""
    alike: dict[tuple[str, str], list[Item]] = defaultdict(list)
    for item in rows:
        if item.kind == KERNEL:
            alike[what_it_is(item), item.arch].append(item)
    found: dict[str, str] = {}
    for items in alike.values():
        common = set[str].intersection(*(set(item.flags) for item in items))
        for item in items:
            own = [plain(flag) for flag in item.flags if flag not in common]
            if own:
                found[item.key] = f"  [{' '.join(own)}]"
    return found


def what_it_is(item: Item) -> str:
    """Return what an entry holds, in one printable line."""
    if item.kind == KERNEL:
        names = ", ".join(item.names)
        return plain(f"{item.source_name}: {names}" if names else item.source_name) or "-"
    if item.kind in (DAMAGED, UNREADABLE):
        return f"({item.kind}: {plain(item.problem)})"
    return f"({plain(item.problem) or item.kind})"


def item_json(item: Item) -> dict[str, object]:
    """Return an item as it stands in JSON: full key, bytes, seconds since the epoch."""
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
    }
