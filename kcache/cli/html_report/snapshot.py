"""Snapshot: what the page says about a cache, gathered in one pass over its entries.

Gathering changes nothing and does not count as a use of an entry.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from kcache._version import __version__
from kcache.directory import CacheDirectory
from kcache.engine.stats import Stats, StatsFile
from kcache.nvrtc import PRODUCER, library
from kcache.nvrtc.inventory import Item, items

if TYPE_CHECKING:
    from kcache import KernelCache

__all__ = ["Snapshot", "gather"]


class Snapshot(NamedTuple):
    """What is known of a cache.

    Attributes:
        written: when, seconds since the epoch.
        about: name -> text: directory, backend, versions.
        max_size: the cap in bytes.
        size: stored bytes, as the backend counts them.
        stats: the counts of all processes.
        items: all entries.
    """

    written: float
    about: Mapping[str, str]
    max_size: int
    size: int
    stats: Stats
    items: tuple[Item, ...]


def gather(
    cache: KernelCache,
    directory: str,
    *,
    seen: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.time,
) -> Snapshot:
    """Return what is known of the cache in `directory`.

    Args:
        cache: opened for reading.
        directory: of the cache.
        seen: called for each entry that was read.
        clock: seconds since the epoch.

    Raises:
        BackendError: the entries or the counts can't be read.
    """
    found: list[Item] = []
    for item in items(cache.engine.backend, PRODUCER):
        found.append(item)
        seen()
    return Snapshot(
        written=clock(),
        about=_about(cache, directory),
        max_size=cache.engine.max_size,
        size=cache.size_bytes,
        stats=StatsFile(CacheDirectory(directory).stats).total(),
        items=tuple(found),
    )


def _about(cache: KernelCache, directory: str) -> dict[str, str]:
    compiler = library.find()
    return {
        "Directory": directory,
        "Backend": cache.config.backend.value,
        "kcache": __version__,
        "Compiler": "none found" if compiler is None else os.path.basename(compiler.path),
        "Python": platform.python_version(),
        "System": f"{platform.system()} {platform.machine()}",
    }
