"""`kcache rm`: deletes entries by their keys, or by name, target and age."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from kcache.admin.filters import Filters, is_wanted
from kcache.cli.filters import filter_options
from kcache.cli.keys import SHORT, complete_keys, key_prefix, resolve
from kcache.cli.open_cache import may_write, open_existing
from kcache.cli.options import directory_option, flag, json_option
from kcache.cli.terminal import counted, say, show
from kcache.nvrtc import PRODUCER
from kcache.nvrtc.inventory import KERNEL, items
from kcache.util.units import format_size

if TYPE_CHECKING:
    from kcache import KernelCache

__all__ = ["remove"]


@click.command("rm", short_help="Delete single entries, or those that fit filters.")
@click.argument("keys", metavar="[KEY]...", nargs=-1, type=key_prefix, shell_complete=complete_keys)
@filter_options
@flag("-n", "--dry-run", help="Say what would be deleted; change nothing.")
@flag("-y", "--yes", help="Accepted as by `clear`. The command never asks.")
@json_option("object")
@directory_option
def remove(
    *,
    keys: tuple[str, ...],
    filters: Filters,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    directory: str | None,
) -> None:
    """Delete the entries KEY, or the kernels that fit the options.

    Each KEY is the first digits of a key that `kcache ls` shows. If a KEY fits no entry or several
    entries, nothing is deleted. A kernel has to fit each kind of option. `kcache ls` with the same
    options shows which kernels fit.
    """
    del yes
    if bool(keys) == (filters != Filters()):
        raise click.UsageError("Give either keys, or options that say which kernels to delete.")
    if not dry_run:
        may_write("rm", directory)
    cache = open_existing(directory, read_only=dry_run, changes=True)
    if cache is None:
        resolve(None, keys)
        _tell([], 0, dry_run=dry_run, as_json=as_json)
        return
    with cache:
        if keys:
            found = resolve(cache.engine.backend, keys)
            sizes = {info.key: info.size for info in found}
        else:
            sizes = _fitting(cache, filters)
        deleted: list[str] = []
        freed = 0
        for key, known in sizes.items():
            size = known if dry_run else _delete(cache, key)
            if size:
                deleted.append(key)
                freed += size
            else:
                say(f"{key[:SHORT]} was deleted meanwhile")
    _tell(deleted, freed, dry_run=dry_run, as_json=as_json)


def _fitting(cache: KernelCache, filters: Filters) -> dict[str, int]:
    """Return the keys and sizes of the kernels that fit."""
    now = time.time()
    return {
        item.key: item.size
        for item in items(cache.engine.backend, PRODUCER)
        if item.kind == KERNEL and is_wanted(item, filters, now)
    }


def _delete(cache: KernelCache, key: str) -> int:
    """Delete an entry; return its bytes, 0 if it was gone."""
    size = cache.engine.backend.delete(key)
    if size:
        cache.engine.note("deleted", key)
    return size


def _tell(deleted: list[str], freed: int, *, dry_run: bool, as_json: bool) -> None:
    what = {"dry_run": dry_run, "keys": deleted, "entries": len(deleted), "size_bytes": freed}
    done = "would delete" if dry_run else "deleted"
    told = f"{done} {counted(len(deleted))}, {format_size(freed)}"
    show(what if as_json else told)
