"""`kcache trim`: evicts the entries that were used least recently."""

from __future__ import annotations

import time

import click

from kcache import KernelCache
from kcache.cli.open_cache import NOTHING_YET, may_write, open_existing
from kcache.cli.options import directory_option, flag, json_option
from kcache.cli.terminal import counted, show
from kcache.engine.eviction import LOW_WATER
from kcache.errors import BackendError
from kcache.nvrtc.inventory import would_evict
from kcache.util.units import format_size, parse_age, parse_size

__all__ = ["trim"]


@click.command(short_help="Evict the least recently used entries.")
@click.option(
    "--max-size", metavar="SIZE", help="Evict until at most SIZE is stored, such as 200MB."
)
@click.option(
    "--older-than",
    metavar="AGE",
    help="Evict entries that nobody has used for AGE, such as 12h, 30d or 2w.",
)
@flag("-n", "--dry-run", help="Say what would be evicted; change nothing.")
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
    cache = open_existing(directory, read_only=dry_run, changes=True)
    if cache is None:
        show(_json(0, 0, dry_run=dry_run) if as_json else f"nothing to evict: {NOTHING_YET}")
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
    done = f"{'would evict' if dry_run else 'evicted'} {counted(count)}, {format_size(freed)}"
    show(_json(count, freed, dry_run=dry_run) if as_json else done)


def _json(count: int, freed: int, *, dry_run: bool) -> dict[str, int]:
    return {"dry_run": dry_run, "entries": count, "bytes_evicted": freed}


def _preview(cache: KernelCache, size: int | None, age: float | None) -> tuple[int, int]:
    """Return how many entries and bytes a trim would evict."""
    goal = size
    if size is None and age is None:
        goal = int(cache.engine.max_size * LOW_WATER)
    since = 0 if age is None else time.time_ns() - age * 1e9
    return would_evict(cache.engine.backend, goal, since_ns=since)
