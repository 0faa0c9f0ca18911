"""`kcache ls`: one line per entry."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable

import click

from kcache.cli.open_cache import directory_option, json_option, open_existing
from kcache.cli.terminal import columns, fit, plain, say, show
from kcache.nvrtc import PRODUCER
from kcache.nvrtc.inventory import DAMAGED, KERNEL, MANIFEST, UNREADABLE, Item, items, unique_length
from kcache.util.units import format_size, format_time

__all__ = ["item_json", "list_entries", "what_it_is"]

#: How to sort: what is compared, and whether the largest comes first.
_ORDERS: dict[str, tuple[Callable[[Item], float | None], bool]] = {
    "last-use": (lambda item: item.used, True),
    "size": (lambda item: item.size, True),
    "age": (lambda item: item.created, True),
    "compile-time": (lambda item: item.compile_seconds, True),
}


@click.command("ls", short_help="List the kernels in the cache.")
@click.option(
    "--sort",
    type=click.Choice(list(_ORDERS)),
    default="last-use",
    show_default=True,
    help="Sort by latest use, largest size, youngest age or longest compile.",
)
@click.option(
    "--reverse", is_flag=True, help="Reverse the order. Entries without a value stay last."
)
@click.option("-a", "--all", "everything", is_flag=True, help="List manifests, too.")
@json_option("array")
@directory_option
def list_entries(
    *, sort: str, reverse: bool, everything: bool, as_json: bool, directory: str | None
) -> None:
    """List the kernels in the cache, one line each.

    KEY has as many digits as tell the entries apart, which is enough for the other commands. AGE is
    the time since the compile, and COMPILE is the time that the compile took. Damaged entries and
    entries of another version of kcache are marked. Listing an entry does not count as a use.

    A manifest records which headers a source was compiled with, so that kcache notices when a
    header changes. There is one manifest for each source with includes.
    """
    cache = open_existing(directory)
    rows: list[Item] = []
    digits = 0
    if cache is not None:
        with cache:
            keys: list[str] = []
            for item in items(cache.engine.backend, PRODUCER):
                keys.append(item.key)
                if everything or item.kind != MANIFEST:
                    rows.append(item)
            digits = unique_length(keys)
    _sort(rows, sort, reverse)
    if as_json:
        show(json.dumps([item_json(item) for item in rows], indent=2))
    elif rows:
        show(fit(_table(rows, digits, time.time())))
    else:
        say("nothing has been cached yet" if cache is None else "there are no kernels")


def _sort(rows: list[Item], sort: str, reverse: bool) -> None:
    value, largest_first = _ORDERS[sort]
    sign = -1 if largest_first != reverse else 1

    def order(item: Item) -> tuple[bool, float, str]:
        found = value(item)
        return found is None, sign * (found or 0), item.key

    rows.sort(key=order)


def _table(rows: Iterable[Item], digits: int, now: float) -> str:
    from kcache.util.units import format_age

    head = ("KEY", "SIZE", "AGE", "USED", "COMPILE", "ARCH", "KERNEL")
    lines = [
        (
            item.key[:digits],
            format_size(item.size),
            "-" if item.created is None else format_age(now - item.created),
            format_age(now - item.used),
            "-" if item.compile_seconds is None else format_time(item.compile_seconds),
            plain(item.arch) or "-",
            what_it_is(item),
        )
        for item in rows
    ]
    return columns([head, *lines])


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
    }
