"""Listing: finds the entry whose key was typed, and shows entries as a table and as JSON.

A key is typed as any unique prefix of at least four digits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from kcache.backend import KEY_LENGTH
from kcache.cli.open_cache import open_existing
from kcache.cli.terminal import columns, width
from kcache.errors import BackendError
from kcache.nvrtc.entries import (
    DAMAGED,
    KERNEL,
    UNREADABLE,
    Item,
    Opened,
    look_into,
    matching,
    unique_length,
)
from kcache.util.units import format_age, format_size, format_time

if TYPE_CHECKING:
    from kcache.backend import Backend, EntryInfo

#: How many digits of a key a message shows.
SHORT = 12
#: How many candidates a message names for an ambiguous prefix.
_NAMED = 8
_LEAST = 4
#: How many keys completion offers.
_OFFERED = 2000


def key_prefix(text: str) -> str:
    """Return the digits of a key or of the beginning of one, in lower case.

    Raises:
        BadParameter: it is neither.
    """
    digits = text.strip().lower()
    if not _LEAST <= len(digits) <= KEY_LENGTH or digits.strip("0123456789abcdef"):
        amount = f"{_LEAST} to {KEY_LENGTH} hexadecimal digits"
        expected = f"{amount}, the first digits of a key from `kcache ls`"
        raise click.BadParameter(f"expected {expected}, got {text!r}")
    return digits


def complete_keys(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the keys that begin with the typed text, the most recently used first.

    If anything is wrong, there are none: a warning would land in the line that is being typed.
    """
    logging.getLogger("kcache").disabled = True
    with suppress(Exception), open_existing(ctx.params.get("directory"), quiet=True) as cache:
        typed = incomplete.strip().lower()
        fitting = (info for info in cache.engine.backend.scan() if info.key.startswith(typed))
        infos = sorted(islice(fitting, _OFFERED), key=lambda info: -info.used_ns)
        digits = max(unique_length((info.key for info in infos), least=SHORT), len(typed))
        return [CompletionItem(info.key[:digits]) for info in infos]
    return []


key_argument = click.argument("key", type=key_prefix, metavar="KEY", shell_complete=complete_keys)


def resolve(backend: Backend, prefixes: Iterable[str]) -> list[EntryInfo]:
    """Return the entry that each prefix means, each entry once.

    Raises:
        BackendError: a prefix means none or several.
    """
    found = matching(backend, list(dict.fromkeys(prefixes)))
    for prefix, infos in found.items():
        if not infos:
            raise BackendError(f"no entry has a key that begins with {prefix}")
        if len(infos) > 1:
            digits = unique_length((info.key for info in infos), least=SHORT)
            shown = ", ".join(info.key[:digits] for info in infos[:_NAMED])
            more = f" and {len(infos) - _NAMED} more" if len(infos) > _NAMED else ""
            what = f"{len(infos)} entries have keys that begin with {prefix}"
            raise BackendError(f"{what}: {shown}{more}")
    return list({infos[0].key: infos[0] for infos in found.values()}.values())


def open_entry(directory: str | None, key: str) -> Opened:
    """Return the entry that the beginning of a key means.

    Raises:
        BackendError: it means none or several.
    """
    with open_existing(directory) as cache:
        (info,) = resolve(cache.engine.backend, [key])
        opened = look_into(cache.engine.backend, info)
    if opened is None:
        raise BackendError(f"the entry {key[:SHORT]} no longer exists")
    return opened


# -- shown ---------------------------------------------------------------------------------------

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
    names = {"size": "size_bytes", "used": "last_use"}
    return {
        names.get(name, name): None if value == "" else value
        for name, value in item._asdict().items()
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
