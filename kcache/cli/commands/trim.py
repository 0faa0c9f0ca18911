"""Commands that take something out of the cache: `kcache rm`, `kcache trim` and `kcache clear`."""

from __future__ import annotations

import time

import click

from kcache import KernelCache
from kcache.cli.keys import SHORT, key_prefix, resolve
from kcache.cli.open_cache import directory_option, may_write, open_existing
from kcache.cli.terminal import can_ask, counted, say, show
from kcache.engine.eviction import LOW_WATER
from kcache.engine.journal import DELETED
from kcache.errors import BackendError
from kcache.nvrtc.inventory import would_evict
from kcache.util.units import format_size, parse_age, parse_size

__all__ = ["clear", "remove", "trim"]


@click.command("rm", short_help="Delete single entries.")
@click.argument("keys", metavar="KEY...", nargs=-1, required=True, type=key_prefix)
@click.option("-y", "--yes", is_flag=True, help="Accepted as by `clear`; nothing is asked.")
@directory_option
def remove(*, keys: tuple[str, ...], yes: bool, directory: str | None) -> None:
    """Delete the entries KEY, each the first digits of a key that `kcache ls` shows.

    If one KEY fits no entry, or several, nothing is deleted.
    """
    del yes
    may_write("rm")
    cache = open_existing(directory, read_only=False)
    if cache is None:
        resolve(None, keys)
        return
    with cache:
        backend = cache.engine.backend
        found = resolve(backend, keys)
        count = freed = 0
        for info in found:
            size = backend.delete(info.key)
            count += size > 0
            freed += size
            if size:
                cache.engine.journal.note(DELETED, info.key)
            else:
                say(f"{info.key[:SHORT]} was deleted meanwhile")
    show(f"deleted {counted(count)}, {format_size(freed)}")


@click.command(short_help="Evict what was used least recently.")
@click.option("--max-size", metavar="SIZE", help="Evict until at most SIZE is left, such as 200MB.")
@click.option(
    "--older-than",
    metavar="AGE",
    help="Evict what was last used longer ago than AGE, such as 12h, 30d or 2w.",
)
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be evicted; change nothing.")
@directory_option
def trim(
    *, max_size: str | None, older_than: str | None, dry_run: bool, directory: str | None
) -> None:
    """Evict the entries that were used least recently.

    Without options, down to 90 % of the cap. With both, what is older than AGE goes first, then
    what exceeds SIZE. The cache keeps its cap by itself; this is for when you want room now.
    """
    if not dry_run:
        may_write("trim")
    age = None if older_than is None else parse_age(older_than, name="--older-than")
    size = None if max_size is None else parse_size(max_size, name="--max-size")
    cache = open_existing(directory, read_only=dry_run)
    if cache is None:
        show("nothing to evict: nothing has been cached yet")
        return
    with cache:
        if dry_run:
            count, freed = _preview(cache, size, age)
        else:
            cache.trim(size, older_than=age)
            stats = cache.stats()
            count, freed = stats.evictions, stats.bytes_evicted
            if stats.errors:
                raise BackendError(f"only {counted(count)} evicted: see the warnings above")
    show(f"{'would evict' if dry_run else 'evicted'} {counted(count)}, {format_size(freed)}")


def _preview(cache: KernelCache, size: int | None, age: float | None) -> tuple[int, int]:
    """Return how many entries and bytes a trim would evict."""
    goal = size
    if size is None and age is None:
        goal = int(cache.engine.max_size * LOW_WATER)
    since = 0 if age is None else time.time_ns() - age * 1e9
    return would_evict(cache.engine.backend, goal, since_ns=since)


@click.command(short_help="Delete every entry.")
@click.option("-y", "--yes", is_flag=True, help="Don't ask. Needed where nobody can be asked.")
@directory_option
def clear(*, yes: bool, directory: str | None) -> None:
    """Delete every entry of the cache.

    The counts stay: `kcache stats --zero` is for those.
    """
    may_write("clear")
    if not yes and not can_ask():
        raise click.UsageError("There is nobody to ask. Pass --yes to delete every entry.")
    cache = open_existing(directory, read_only=False)
    if cache is None:
        show("nothing to delete: nothing has been cached yet")
        return
    with cache:
        size, count = cache.size_bytes, cache.entry_count
        question = f"Delete {counted(count)}, {format_size(size)}, in {cache.directory}?"
        if not yes and not click.confirm(question, err=True):
            raise click.exceptions.Exit(1)
        removed = cache.clear()
        if cache.stats().errors:
            raise BackendError(f"{removed} of {count} entries deleted: see the warnings above")
    show(f"deleted {counted(removed)}, {format_size(size)}")
