"""`kcache ls`: lists the entries of a cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from kcache.admin.filters import Filters, is_wanted, parse_filters
from kcache.cli.listing import item_json, listing
from kcache.cli.open_cache import open_existing
from kcache.cli.parameters import directory_option, filter_options, flag, json_option
from kcache.cli.terminal import (
    notify,
    show,
)
from kcache.nvrtc.entries import KERNEL, MANIFEST, Item, items, unique_length

if TYPE_CHECKING:
    pass

#: Sort orders: the value that is compared. The largest comes first.
_ORDERS: dict[str, Callable[[Item], float | None]] = {
    "last-use": lambda item: item.used,
    "size": lambda item: item.size,
    "age": lambda item: item.created,
    "compile-time": lambda item: item.compile_seconds,
}


@click.command("ls", short_help="List the kernels in the cache.")
@click.option(
    "--sort",
    type=click.Choice(list(_ORDERS)),
    default="last-use",
    show_default=True,
    help="Sort by latest use, largest size, youngest age or longest compile.",
)
@flag("--reverse", help="Reverse the order. Entries without a value stay last.")
@flag("-a", "--all", "everything", help="List manifests, too.")
@filter_options
@json_option("array")
@directory_option
def list_entries(
    *,
    sort: str,
    reverse: bool,
    everything: bool,
    as_json: bool,
    directory: str | None,
    **given: Any,  # noqa: ANN401
) -> None:
    """List the kernels in the cache, one line each.

    KEY has as many digits as distinguish the entries, which is enough for the other commands. AGE
    is the time since the compile, and COMPILE is the time that the compile took. Damaged entries
    and entries of another version of kcache are marked. Listing an entry does not count as a use.
    If kernels differ only in their options, the list shows these options. On a narrow terminal, it
    leaves out columns until the names can be read.

    A manifest records which headers a source was compiled with, so that kcache notices when a
    header changes. There is one manifest for each source with includes.
    """
    now, filters = time.time(), parse_filters(**given)
    rows: list[Item] = []
    keys: list[str] = []
    with open_existing(directory) as cache:
        for item in items(cache.engine.backend):
            keys.append(item.key)
            if not everything and item.kind == MANIFEST:
                continue
            fits = item.kind == KERNEL and is_wanted(item, filters, now)
            if fits or filters == Filters():
                rows.append(item)
    _sort(rows, sort, reverse)
    if as_json:
        show([item_json(item) for item in rows])
    elif rows:
        show(listing(rows, unique_length(keys), now))
    elif cache.directory:
        notify("there are no kernels" if filters == Filters() else "no kernel matches the filters")


def _sort(rows: list[Item], sort: str, reverse: bool) -> None:
    def order(item: Item) -> tuple[bool, float, str]:
        found = _ORDERS[sort](item)
        return found is None, (found or 0) * (1 if reverse else -1), item.key

    rows.sort(key=order)
