"""`kcache info`: where a cache is, how full it is, and what was done with it."""

from __future__ import annotations

import click

from kcache.admin.info import format_info, remote_lines
from kcache.cli.open_cache import (
    directory_option,
    named_directory,
    open_existing,
)
from kcache.cli.terminal import show
from kcache.directory import CacheDirectory
from kcache.engine.stats import StatsFile
from kcache.kernels.tiers import remote_status

__all__ = ["info"]


@click.command(short_help="Show where the cache is, how full it is and what it has done.")
@directory_option
def info(*, directory: str | None) -> None:
    """Show where the cache is, how full it is, and what all processes have done with it."""
    cache = open_existing(directory)
    if cache is None:
        show(f"directory  {named_directory(directory)}\n(nothing has been cached yet)")
        return
    with cache:
        place = str(cache.directory)
        backend = cache.config.backend.value
        totals = StatsFile(CacheDirectory(place).stats).total()
        text = format_info(cache.engine, directory=place, backend=backend, stats=totals)
        tiers = remote_lines(remote_status(cache.config))
    show("\n".join([text, *(f"{address}  {counts}" for address, counts in tiers)]))
