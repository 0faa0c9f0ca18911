"""`kcache clear`: deletes every entry."""

from __future__ import annotations

import click

from kcache.admin.info import Kinds, count_kinds, told_kinds
from kcache.cli.open_cache import NOTHING_YET, may_write, open_existing
from kcache.cli.options import directory_option, flag, json_option
from kcache.cli.terminal import can_ask, counted, show
from kcache.errors import BackendError
from kcache.nvrtc import PRODUCER
from kcache.util.units import format_size

__all__ = ["clear"]


@click.command(short_help="Delete every entry.")
@flag("-y", "--yes", help="Don't ask. Required without a terminal.")
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
        show(_json(0, Kinds(0, 0, 0, 0), 0) if as_json else f"nothing to delete: {NOTHING_YET}")
        return
    with cache:
        size, kinds = cache.size_bytes, count_kinds(cache.engine, PRODUCER)
        about = f"({told_kinds(kinds)}), {format_size(size)}"
        question = f"Delete {counted(cache.entry_count)} {about}, in {cache.directory}?"
        if not yes and not click.confirm(question, err=True):
            raise click.exceptions.Exit(1)
        removed = cache.clear()
        if cache.stats().errors:
            raise BackendError(f"{removed} of {counted(kinds.all)} deleted: see the warnings above")
    show(_json(removed, kinds, size) if as_json else f"deleted {counted(removed)} {about}")


def _json(count: int, kinds: Kinds, size: int) -> dict[str, int]:
    about = {"entries": count, "kernels": kinds.kernels, "manifests": kinds.manifests}
    return {**about, "size_bytes": size}
