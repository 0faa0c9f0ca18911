"""`kcache info`: shows where a cache is, how full it is, and how it was used."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from kcache.admin.info import count_kinds, format_info, remote_lines
from kcache.cli.open_cache import (
    directory_option,
    json_option,
    named_directory,
    open_existing,
    why_none,
)
from kcache.cli.terminal import show
from kcache.directory import CacheDirectory
from kcache.engine.stats import StatsFile
from kcache.kernels.tiers import remote_status
from kcache.nvrtc import PRODUCER
from kcache.registry import holders

if TYPE_CHECKING:
    from kcache import KernelCache

__all__ = ["info"]


@click.command(short_help="Show where the cache is, how full it is and what it has done.")
@json_option("object")
@directory_option
def info(*, as_json: bool, directory: str | None) -> None:
    """Show where the cache is, how full it is, and what all processes have done with it.

    Kernels and manifests are counted apart: a manifest leads from a source with includes to its
    kernels. With more than 2,000 entries, these two counts are estimates from 2,000 of them.
    """
    cache = open_existing(directory)
    if cache is not None:
        with cache:
            show(_json(cache) if as_json else _text(cache))
    elif as_json:
        about = {"directory": named_directory(directory), "entries": 0, "size_bytes": 0}
        show(json.dumps(about, indent=2))
    else:
        show(f"directory  {named_directory(directory)}\n({why_none(directory)})")


def _text(cache: KernelCache) -> str:
    files, backend = CacheDirectory(str(cache.directory)), cache.config.backend.value
    text = format_info(
        cache.engine,
        directory=files.path,
        backend=backend,
        stats=StatsFile(files.stats).total(),
        kinds=count_kinds(cache.engine, PRODUCER),
        elsewhere=holders(files, besides=backend),
    )
    tiers = remote_lines(remote_status(cache.config))
    return "\n".join([text, *(f"{address}  {counts}" for address, counts in tiers)])


def _json(cache: KernelCache) -> str:
    files, (backend, source) = CacheDirectory(str(cache.directory)), cache.config.backend
    kinds = count_kinds(cache.engine, PRODUCER)
    about = {
        "directory": files.path,
        "backend": backend,
        "backend_source": source,
        "entries": cache.entry_count,
        "kernels": kinds.kernels,
        "manifests": kinds.manifests,
        "others": kinds.others,
        "entries_read": kinds.read,
        "size_bytes": cache.size_bytes,
        "max_size": cache.engine.max_size,
        "max_size_source": cache.config.max_size.source,
        "elsewhere": [each._asdict() for each in holders(files, besides=backend)],
        "stats": StatsFile(files.stats).total().to_dict(),
        "remotes": remote_status(cache.config),
    }
    return json.dumps(about, indent=2)
