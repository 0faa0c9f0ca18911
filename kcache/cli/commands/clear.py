"""`kcache clear`: deletes every entry."""

from __future__ import annotations

import json

import click

from kcache.cli.open_cache import directory_option, json_option, may_write, open_existing
from kcache.cli.terminal import can_ask, counted, show
from kcache.errors import BackendError
from kcache.util.units import format_size

__all__ = ["clear"]


@click.command(short_help="Delete every entry.")
@click.option("-y", "--yes", is_flag=True, help="Don't ask. Required without a terminal.")
@json_option("object")
@directory_option
def clear(*, yes: bool, as_json: bool, directory: str | None) -> None:
    """Delete every entry of the cache.

    The counts stay. To reset them, use `kcache stats --zero`.
    """
    may_write("clear", directory)
    if not yes and not can_ask():
        raise click.UsageError("There is no terminal to ask on. Pass --yes to delete every entry.")
    cache = open_existing(directory, read_only=False, changes=True)
    if cache is None:
        if as_json:
            show(_json(0, 0))
        else:
            show("nothing to delete: nothing has been cached yet")
        return
    with cache:
        size, count = cache.size_bytes, cache.entry_count
        question = f"Delete {counted(count)}, {format_size(size)}, in {cache.directory}?"
        if not yes and not click.confirm(question, err=True):
            raise click.exceptions.Exit(1)
        removed = cache.clear()
        if cache.stats().errors:
            raise BackendError(f"{removed} of {counted(count)} deleted: see the warnings above")
    show(_json(removed, size) if as_json else f"deleted {counted(removed)}, {format_size(size)}")


def _json(count: int, size: int) -> str:
    return json.dumps({"entries": count, "size_bytes": size}, indent=2)
