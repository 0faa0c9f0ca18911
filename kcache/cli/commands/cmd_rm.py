"""`kcache rm` deletes some entries, `trim` evicts the least recently used, `clear` deletes all.

`kcache verify` reads and checks every entry, and can delete damaged ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import click

from kcache.admin.info import count_kinds, kinds_in_words
from kcache.admin.transfer import selection
from kcache.admin.verify import Report
from kcache.admin.verify import verify as examine
from kcache.cli.commands.cmd_ls import complete_keys, key_prefix, resolve
from kcache.cli.options import cache_options, filter_options, flag, open_existing
from kcache.cli.terminal import SHORT, can_ask, notify, progress, show
from kcache.engine.eviction import LOW_WATER
from kcache.errors import BackendError
from kcache.nvrtc.entries import DAMAGED, KERNEL, MANIFEST, OTHER, UNREADABLE, items, would_evict
from kcache.util.units import counted, format_size, parse_age, parse_size, plain


@click.command(short_help="Evict the least recently used entries.")
@click.option(
    "--max-size", metavar="SIZE", help="Evict until at most SIZE is stored, such as 200MB."
)
@click.option(
    "--older-than",
    metavar="AGE",
    help="Evict entries that were last used more than AGE ago, such as 12h, 30d or 2w.",
)
@flag("-n", "--dry-run", help="Show what would be evicted; change nothing.")
@cache_options("object")
def trim(
    *, max_size: str | None, older_than: str | None, dry_run: bool, directory: str | None
) -> None:
    """Evict the entries that were used least recently.

    Without options, entries are evicted until the cache is at most 90 % full. With both options,
    the entries older than AGE are evicted first, and then others until at most SIZE is stored.
    This command is never needed to keep the cache below its cap. Use it to free space at once.
    """
    age = None if older_than is None else parse_age(older_than, name="--older-than")
    size = None if max_size is None else parse_size(max_size, name="--max-size")
    with open_existing(directory, "trim", writes=not dry_run) as cache:
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
    show(done, {"dry_run": dry_run, "entries": count, "bytes_evicted": freed})


@click.command("rm", short_help="Delete entries by their keys, or kernels that match filters.")
@click.argument("keys", metavar="[KEY]...", nargs=-1, type=key_prefix, shell_complete=complete_keys)
@filter_options
@flag("-n", "--dry-run", help="Show what would be deleted; change nothing.")
@click.option("-y", "--yes", is_flag=True, expose_value=False, help="No effect, as rm never asks.")
@cache_options("object")
def remove(*, keys: tuple[str, ...], dry_run: bool, directory: str | None, **given: Any) -> None:  # noqa: ANN401
    """Delete the entries with the given keys, or the kernels that match the filter options.

    Each KEY is the first digits of a key that `kcache ls` shows. If a KEY matches no entry or
    several entries, nothing is deleted. A kernel is deleted only if it matches all filter options.
    Of the values of a repeated option, it must match one. `kcache ls` with the same options shows
    which kernels match.
    """
    wanted = selection(**given)
    if bool(keys) == (wanted is not None):
        raise click.UsageError("Expected either keys or filter options.")
    with open_existing(directory, "rm", writes=not dry_run) as cache:
        backend = cache.engine.backend
        found = resolve(backend, keys) if wanted is None else filter(wanted, items(backend))
        sizes = {each.key: each.size for each in found}
        if not dry_run:
            sizes = {key: backend.delete(key) for key in sizes}
            for key in filter(sizes.get, sizes):
                cache.engine.note("deleted", key)
    for key in [key for key, size in sizes.items() if not size]:
        notify(f"{key[:SHORT]} was already deleted")
        del sizes[key]
    count, freed = len(sizes), sum(sizes.values())
    done = f"{'would delete' if dry_run else 'deleted'} {counted(count)}, {format_size(freed)}"
    show(done, {"dry_run": dry_run, "keys": [*sizes], "entries": count, "size_bytes": freed})


@click.command(short_help="Delete every entry.")
@flag("-y", "--yes", help="Don't ask for confirmation. Required if there is no terminal.")
@cache_options("object")
def clear(*, yes: bool, directory: str | None) -> None:
    """Delete every entry of the cache.

    The counts that `kcache stats` shows are kept. To set them to zero, use `kcache stats --zero`.
    """
    if not yes and not can_ask():
        raise click.UsageError("Can't ask without a terminal. Pass --yes to delete every entry.")
    with open_existing(directory, "clear") as cache:
        size, kinds = cache.size_bytes, count_kinds(cache.engine)
        about = f"({kinds_in_words(kinds)}), {format_size(size)}"
        question = f"Delete {counted(cache.entry_count)} {about}, in {cache.directory}?"
        if not yes and cache.directory and not click.confirm(question, err=True):
            raise click.exceptions.Exit(1)
        removed = cache.clear()
        if cache.stats().errors:
            raise BackendError(f"{removed} of {counted(kinds.all)} deleted: see the warnings above")
    amounts = {"entries": removed, "kernels": kinds.kernels, "manifests": kinds.manifests}
    show(f"deleted {counted(removed)} {about}", {**amounts, "size_bytes": size})


# -- verify ----------------------------------------------------------------------------------------


@click.command(short_help="Read and check every entry.")
@flag("--repair", help="Delete damaged entries, and repair the files of the backend.")
@cache_options("object")
def verify(*, repair: bool, directory: str | None) -> None:
    """Read and check every entry, then check the files of the backend.

    kcache never uses a damaged entry, and compiles its kernel again when a program requests it. So
    deleting damaged entries with `--repair` only frees space. Without `--repair`, the command
    changes nothing. It exits with 1 if a damaged or unreadable entry, or another problem of the
    backend, is left.
    """
    with open_existing(directory, "verify --repair" if repair else "") as cache:
        report = examine(cache.engine.backend, repair=repair, progress=progress)
        for item in report.bad if repair else ():
            if item.kind == DAMAGED:
                cache.engine.note("refused", item.key, item.problem)
    record = {
        "entries": report.entries,
        "size_bytes": report.bytes,
        "sound": report.kinds[KERNEL] + report.kinds[MANIFEST],
        "other": report.kinds[OTHER],
        "damaged": report.kinds[DAMAGED],
        "unreadable": report.kinds[UNREADABLE],
        "deleted": report.deleted,
        "problems": [
            {"key": item.key, "kind": item.kind, "problem": item.problem} for item in report.bad
        ],
        "backend_problems": report.medium,
        "backend_problems_left": report.left,
    }
    show("\n".join(_lines(report, repair=repair)), record)
    raise click.exceptions.Exit(int(not report.sound))


def _lines(report: Report, *, repair: bool) -> Iterator[str]:
    kinds = report.kinds
    yield from (f"{item.kind} {item.key[:SHORT]}: {plain(item.problem)}" for item in report.bad)
    yield from (f"backend: {plain(problem)}" for problem in report.medium)
    yield f"{counted(report.entries)} read, {format_size(report.bytes)}"
    yield f"  {kinds[KERNEL] + kinds[MANIFEST]} sound"
    if kinds[OTHER]:
        yield f"  {kinds[OTHER]} of another version of kcache, or of another program"
    if kinds[DAMAGED]:
        yield f"  {kinds[DAMAGED]} damaged{f', {report.deleted} deleted' if repair else ''}"
    if kinds[UNREADABLE]:
        yield f"  {kinds[UNREADABLE]} unreadable"
    if report.medium:
        done = f", {len(report.left)} left after the repair" if repair else ""
        yield f"{counted(len(report.medium), 'problem')} in the backend{done}"
    if not report.sound and not repair:
        yield "Damaged entries are never used. `kcache verify --repair` deletes them."
