"""`kcache stats`: shows where a cache is, how full it is, and what was done with it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import click

from kcache._version import __version__
from kcache.admin.info import Kinds, cache_lines, count_kinds, exposition, remote_lines, stats_lines
from kcache.backend import Usage
from kcache.cli.open_cache import load_settings, may_write, named_directory, open_existing, why_none
from kcache.cli.options import directory_option, flag, json_option
from kcache.cli.terminal import columns, say, show, write_stdout
from kcache.directory import CacheDirectory
from kcache.engine.stats import Stats, StatsFile
from kcache.kernels.tiers import remote_status
from kcache.nvrtc import PRODUCER

if TYPE_CHECKING:
    from kcache import KernelCache
    from kcache.config import Config

__all__ = ["stats"]


@click.command(short_help="Show where the cache is, how full it is and what it has done.")
@json_option("object")
@flag("--prometheus", help="Print the text format of Prometheus, for a textfile collector.")
@flag("--zero", help="Show the counts, then set them to zero.")
@directory_option
def stats(*, as_json: bool, prometheus: bool, zero: bool, directory: str | None) -> None:
    """Show where the cache is, how full it is, and what all processes have done with it.

    The counts are those since the cache was created or its counts were set to zero. Kernels and
    manifests are counted apart: a manifest leads from a source with includes to its kernels. With
    more than 2,000 entries, these two counts are estimates from 2,000 of them. `kcache info` does
    the same.
    """
    if as_json and prometheus:
        raise click.UsageError("--json and --prometheus exclude each other.")
    if zero:
        may_write("stats --zero", directory)
    cache = open_existing(directory, changes=zero)
    with cache or nullcontext():
        path = named_directory(directory) if cache is None else str(cache.directory)
        file = StatsFile(CacheDirectory(path).stats)
        totals = Stats() if cache is None else file.total()  # another directory is not read
        settings = load_settings(directory)[0] if cache is None else cache.config
        if as_json:
            show(_json(cache, settings, path, totals))
        elif prometheus:
            write_stdout(_exposition(cache, settings, path, totals).encode())
        else:
            remotes = remote_lines(remote_status(settings))
            show(columns([*_lines(cache, settings, path, totals), *remotes]))
            if cache is None:
                show(f"({why_none(directory)})")
    if zero:
        if cache is not None:
            file.zero()
        say("counting starts again from zero")


def _lines(
    cache: KernelCache | None, settings: Config, path: str, totals: Stats
) -> list[tuple[str, str]]:
    if cache is None:
        return [("directory", path)]
    kinds = count_kinds(cache.engine, PRODUCER)
    backend = settings.backend.value
    lines = cache_lines(cache.engine, directory=path, backend=backend, kinds=kinds)
    return [*lines, *stats_lines(totals)]


def _json(
    cache: KernelCache | None, settings: Config, path: str, totals: Stats
) -> dict[str, object]:
    kinds = Kinds(0, 0, 0, 0) if cache is None else count_kinds(cache.engine, PRODUCER)
    return {
        "directory": path,
        "backend": settings.backend.value,
        "backend_source": settings.backend.source,
        "entries": 0 if cache is None else cache.entry_count,
        "kernels": kinds.kernels,
        "manifests": kinds.manifests,
        "others": kinds.others,
        "entries_read": kinds.read,
        "size_bytes": 0 if cache is None else cache.size_bytes,
        "max_size_bytes": int(settings.max_size.value),
        "max_size_source": settings.max_size.source,
        **totals.to_dict(),
        "remotes": remote_status(settings),
    }


def _exposition(cache: KernelCache | None, settings: Config, path: str, totals: Stats) -> str:
    usage = Usage(0, 0) if cache is None else Usage(cache.size_bytes, cache.entry_count)
    about = {"version": __version__, "directory": path, "backend": settings.backend.value}
    remotes = remote_status(settings)
    return exposition(totals, usage, settings.max_size.value, about, remotes)
