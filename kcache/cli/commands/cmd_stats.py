"""`kcache stats`: shows where a cache is, how full it is, and what was done with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kcache._version import __version__
from kcache.admin.info import cache_lines, count_kinds, exposition, remote_lines, stats_lines
from kcache.backend import Usage
from kcache.cli.open_cache import may_write, named_directory, open_existing
from kcache.cli.parameters import directory_option, flag, json_option
from kcache.cli.terminal import columns, notify, show, write_stdout
from kcache.engine.stats import Stats, StatsFile
from kcache.kernels.tiers import remote_status

if TYPE_CHECKING:
    from kcache import KernelCache


@click.command(short_help="Show where the cache is, how full it is and what it has done.")
@json_option("object")
@flag("--prometheus", help="Print the text format of Prometheus, for a textfile collector.")
@flag("--zero", help="Show the counts, then set them to zero.")
@directory_option
def stats(*, as_json: bool, prometheus: bool, zero: bool, directory: str | None) -> None:
    """Show where the cache is, how full it is, and what all processes have done with it.

    The counts are those since the cache was created or its counts were set to zero. Kernels and
    manifests are counted separately: a manifest leads from a source with includes to its kernels.
    With more than 2,000 entries, these two counts are estimates from 2,000 of them. `kcache info`
    does the same.
    """
    if as_json and prometheus:
        raise click.UsageError("--json and --prometheus exclude each other.")
    if zero:
        may_write("stats --zero", directory)
    with open_existing(directory, changes=zero) as cache:
        files = cache.opened.directory
        file = None if files is None else StatsFile(files.stats)
        totals = Stats() if file is None else file.total()
        path = cache.opened.path or named_directory(directory)
        remotes = remote_status(cache.config)
        if as_json:
            show({**_json(cache, path), **totals.to_dict(), "remotes": remotes})
        elif prometheus:
            usage = Usage(cache.size_bytes, cache.entry_count)
            backend, cap = cache.config.backend.value, cache.config.max_size.value
            about = {"version": __version__, "directory": path, "backend": backend}
            write_stdout(exposition(totals, usage, cap, about, remotes).encode())
        else:
            kinds, backend = count_kinds(cache.engine), cache.config.backend.value
            lines = cache_lines(cache.engine, directory=path, backend=backend, kinds=kinds)
            show(columns([*lines, *stats_lines(totals), *remote_lines(remotes)]))
    if zero:
        if file is not None:
            file.zero()
        notify("counting starts again from zero")


def _json(cache: KernelCache, path: str) -> dict[str, object]:
    kinds, settings = count_kinds(cache.engine), cache.config
    return {
        "directory": path,
        "backend": settings.backend.value,
        "backend_source": settings.backend.source,
        "entries": cache.entry_count,
        "kernels": kinds.kernels,
        "manifests": kinds.manifests,
        "others": kinds.others,
        "entries_read": kinds.read,
        "size_bytes": cache.size_bytes,
        "max_size_bytes": int(settings.max_size.value),
        "max_size_source": settings.max_size.source,
    }
