"""`kcache stats`: prints what all processes have done with a cache."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import TYPE_CHECKING

import click

from kcache._version import __version__
from kcache.admin.info import remote_lines, stats_lines
from kcache.admin.prometheus import exposition
from kcache.backend import Usage
from kcache.cli.open_cache import (
    directory_option,
    json_option,
    load_settings,
    may_write,
    named_directory,
    open_existing,
)
from kcache.cli.terminal import columns, say, show
from kcache.directory import CacheDirectory
from kcache.engine.stats import StatsFile
from kcache.kernels.tiers import remote_status

if TYPE_CHECKING:
    from kcache import KernelCache

__all__ = ["stats"]


@click.command(short_help="Show what all processes have done with the cache.")
@json_option("object")
@click.option(
    "--prometheus",
    is_flag=True,
    help="Print the text format of Prometheus, for a textfile collector.",
)
@click.option("--zero", is_flag=True, help="Show the counts, then set them to zero.")
@directory_option
def stats(*, as_json: bool, prometheus: bool, zero: bool, directory: str | None) -> None:
    """Show what all processes have done with the cache since it was created or set to zero."""
    if as_json and prometheus:
        raise click.UsageError("--json and --prometheus exclude each other.")
    if zero:
        may_write("stats --zero", directory)
    cache = open_existing(directory, changes=zero)
    with cache or nullcontext():
        place = named_directory(directory) if cache is None else str(cache.directory)
        totals = _stats_file(place).total()
        usage = _usage(cache)
        settings, _ = load_settings(directory) if cache is None else (cache.config, None)
        tiers = remote_status(settings)
        if as_json:
            figures = {"directory": place, "entries": usage.entries, "size_bytes": usage.bytes}
            remotes = {"remotes": tiers} if tiers else {}
            show(json.dumps({**figures, **totals.to_dict(), **remotes}, indent=2))
        elif prometheus:
            about = {
                "version": __version__,
                "directory": place,
                "backend": settings.backend.value,
            }
            show(
                exposition(totals, usage, settings.max_size.value, about, tiers).removesuffix("\n")
            )
        else:
            show(columns([*stats_lines(totals), *remote_lines(tiers)]))
    if zero:
        if cache is not None:
            _stats_file(place).zero()
        say("counting starts again from zero")


def _usage(cache: KernelCache | None) -> Usage:
    return Usage(0, 0) if cache is None else Usage(cache.size_bytes, cache.entry_count)


def _stats_file(directory: str) -> StatsFile:
    return StatsFile(CacheDirectory(directory).stats)
