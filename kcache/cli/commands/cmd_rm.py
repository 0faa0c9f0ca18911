"""`kcache rm` deletes some entries, `trim` evicts the coldest, `clear` deletes all."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from kcache.admin.filters import Filters, is_wanted, parse_filters
from kcache.admin.info import count_kinds, kinds_in_words
from kcache.cli.listing import SHORT, complete_keys, key_prefix, resolve
from kcache.cli.open_cache import may_write, open_existing
from kcache.cli.parameters import directory_option, filter_options, flag, json_option
from kcache.cli.terminal import can_ask, notify, show
from kcache.engine.eviction import LOW_WATER
from kcache.errors import BackendError
from kcache.nvrtc.entries import KERNEL, items, would_evict
from kcache.util.units import counted, format_size, parse_age, parse_size

if TYPE_CHECKING:
    from kcache import KernelCache


@click.command(short_help="Evict the least recently used entries.")
@click.option(
    "--max-size", metavar="SIZE", help="Evict until at most SIZE is stored, such as 200MB."
)
@click.option(
    "--older-than",
    metavar="AGE",
    help="Evict entries that were not used for AGE, such as 12h, 30d or 2w.",
)
@flag("-n", "--dry-run", help="Show what would be evicted; change nothing.")
@json_option("object")
@directory_option
def trim(
    *,
    max_size: str | None,
    older_than: str | None,
    dry_run: bool,
    as_json: bool,
    directory: str | None,
) -> None:
    """Evict the entries that were used least recently.

    Without options, evict down to 90 % of the cap. With both options, first evict what is older
    than AGE, then what exceeds SIZE. The cache stays below its cap on its own. Use this command to
    free space at once.
    """
    if not dry_run:
        may_write("trim", directory)
    age = None if older_than is None else parse_age(older_than, name="--older-than")
    size = None if max_size is None else parse_size(max_size, name="--max-size")
    with open_existing(directory, read_only=dry_run, changes=True) as cache:
        if dry_run:
            if size is None and age is None:
                size = int(cache.engine.max_size * LOW_WATER)
            since = 0 if age is None else time.time_ns() - age * 1e9
            count, freed = would_evict(cache.engine.backend, size, since_ns=since)
        else:
            cache.trim(size, older_than=age)
            stats = cache.stats()
            count, freed = stats.evictions, stats.bytes_evicted
            if stats.errors:
                raise BackendError(f"only {counted(count)} evicted: see the warnings above")
    done = f"{'would evict' if dry_run else 'evicted'} {counted(count)}, {format_size(freed)}"
    _show(as_json, done, dry_run=dry_run, entries=count, bytes_evicted=freed)


@click.command("rm", short_help="Delete single entries, or those that match filters.")
@click.argument("keys", metavar="[KEY]...", nargs=-1, type=key_prefix, shell_complete=complete_keys)
@filter_options
@flag("-n", "--dry-run", help="Show what would be deleted; change nothing.")
@flag("-y", "--yes", help="No effect: the command never asks. Accepted for symmetry with `clear`.")
@json_option("object")
@directory_option
def remove(
    *,
    keys: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    as_json: bool,
    directory: str | None,
    **given: Any,  # noqa: ANN401
) -> None:
    """Delete the entries KEY, or the kernels that match the options.

    Each KEY is the first digits of a key that `kcache ls` shows. If a KEY matches no entry or
    several entries, nothing is deleted. A kernel has to match every kind of option. `kcache ls`
    with the same options shows which kernels match.
    """
    del yes
    filters = parse_filters(**given)
    if bool(keys) == (filters != Filters()):
        raise click.UsageError("Expected either keys or filter options.")
    if not dry_run:
        may_write("rm", directory)
    with open_existing(directory, read_only=dry_run, changes=True) as cache:
        if keys:
            found = resolve(cache.engine.backend, keys)
            sizes = {info.key: info.size for info in found}
        else:
            sizes = _fitting(cache, filters)
        if not dry_run:
            sizes = {key: _delete(cache, key) for key in sizes}
    for key in [key for key, size in sizes.items() if not size]:
        notify(f"{key[:SHORT]} was already deleted")
        del sizes[key]
    count, freed = len(sizes), sum(sizes.values())
    done = f"{'would delete' if dry_run else 'deleted'} {counted(count)}, {format_size(freed)}"
    _show(as_json, done, dry_run=dry_run, keys=[*sizes], entries=count, size_bytes=freed)


def _fitting(cache: KernelCache, filters: Filters) -> dict[str, int]:
    """Return the keys and sizes of the kernels that match."""
    now = time.time()
    return {
        item.key: item.size
        for item in items(cache.engine.backend)
        if item.kind == KERNEL and is_wanted(item, filters, now)
    }


def _delete(cache: KernelCache, key: str) -> int:
    """Delete an entry; return its bytes, 0 if it was gone."""
    size = cache.engine.backend.delete(key)
    if size:
        cache.engine.note("deleted", key)
    return size


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
        raise click.UsageError("Can't ask without a terminal. Pass --yes to delete every entry.")
    with open_existing(directory, read_only=False, changes=True) as cache:
        size, kinds = cache.size_bytes, count_kinds(cache.engine)
        about = f"({kinds_in_words(kinds)}), {format_size(size)}"
        question = f"Delete {counted(cache.entry_count)} {about}, in {cache.directory}?"
        if not yes and cache.directory and not click.confirm(question, err=True):
            raise click.exceptions.Exit(1)
        removed = cache.clear()
        if cache.stats().errors:
            raise BackendError(f"{removed} of {counted(kinds.all)} deleted: see the warnings above")
    amounts = {"entries": removed, "kernels": kinds.kernels, "manifests": kinds.manifests}
    _show(as_json, f"deleted {counted(removed)} {about}", **amounts, size_bytes=size)


def _show(as_json: bool, sentence: str, **amounts: object) -> None:
    """Show what was done: as JSON the amounts, else the sentence."""
    show(amounts if as_json else sentence)
