"""Snapshot: what the page says about a cache, gathered in one pass over its entries.

Gathering changes nothing and does not count as a use of an entry. The page limits what is kept,
except for one tally for each kernel and target.
"""

from __future__ import annotations

import heapq
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kcache._version import __version__
from kcache.directory import CacheDirectory
from kcache.engine.history import History, Hour
from kcache.engine.stats import Stats, StatsFile
from kcache.nvrtc import PRODUCER, library
from kcache.nvrtc.inventory import KERNEL, MANIFEST, Item, items

if TYPE_CHECKING:
    from kcache import KernelCache

__all__ = ["Snapshot", "Share", "gather"]

#: How many rows the lists of single kernels, targets and kernel names have.
_SINGLE, _ARCHS, _KERNELS = 10, 8, 12


class Share(NamedTuple):
    """The share of a cache that one arch, kernel or kind of entries takes.

    Attributes:
        name: of the arch, the source or the kind.
        names: name expressions, of a kernel.
        entries: how many.
        size: their stored bytes.
        compile_seconds: what compiling them took.
        merged: how many smaller shares this one combines; 0 for a share with a name.
    """

    name: str
    names: tuple[str, ...] = ()
    entries: int = 0
    size: int = 0
    compile_seconds: float = 0.0
    merged: int = 0

    def plus(self, entries: int, size: int, compile_seconds: float) -> Share:
        """Return the share with an entry added."""
        return self._replace(
            entries=self.entries + entries,
            size=self.size + size,
            compile_seconds=self.compile_seconds + compile_seconds,
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is known of a cache.

    Attributes:
        written: when, seconds since the epoch.
        about: name -> text: directory, backend, versions.
        max_size: the cap in bytes.
        size: stored bytes, as the backend counts them.
        stats: the counts of all processes.
        hours: the hours of the last 90 days in which something was counted.
        kinds: entries of each kind of `kcache.nvrtc.inventory`.
        archs: kernels by target, largest share first, the rest as one.
        kernels: kernels by source and name expressions, likewise.
        largest: the largest entries that are no manifests.
        coldest: the least recently used ones.
    """

    written: float
    about: Mapping[str, str]
    max_size: int
    size: int
    stats: Stats
    hours: tuple[Hour, ...]
    kinds: Mapping[str, Share]
    archs: tuple[Share, ...]
    kernels: tuple[Share, ...]
    largest: tuple[Item, ...]
    coldest: tuple[Item, ...]

    @property
    def entries(self) -> int:
        """How many entries were found."""
        return sum(share.entries for share in self.kinds.values())


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
        BackendError: the entries, the counts or the history can't be read.
    """
    census = _Census()
    for item in items(cache.engine.backend, PRODUCER):
        census.add(item)
        seen()
    return Snapshot(
        written=clock(),
        about=_about(cache, directory),
        max_size=cache.engine.max_size,
        size=cache.size_bytes,
        stats=StatsFile(CacheDirectory(directory).stats).total(),
        hours=tuple(History(CacheDirectory(directory).history, clock=clock).hours()),
        kinds=census.kinds,
        archs=_top(census.archs.values(), _ARCHS),
        kernels=_top(census.kernels.values(), _KERNELS),
        largest=census.largest.items(),
        coldest=census.coldest.items(),
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


class _Census:
    """Counts entries by kind, arch and kernel."""

    def __init__(self) -> None:
        self.kinds: dict[str, Share] = {}
        self.archs: dict[str, Share] = {}
        self.kernels: dict[tuple[str, tuple[str, ...]], Share] = {}
        self.largest = _Best(_SINGLE, lambda item: item.size)
        self.coldest = _Best(_SINGLE, lambda item: -item.used)

    def add(self, item: Item) -> None:
        more = (1, item.size, item.compile_seconds or 0.0)
        self.kinds[item.kind] = self.kinds.get(item.kind, Share(item.kind)).plus(*more)
        if item.kind != MANIFEST:
            self.largest.add(item)
            self.coldest.add(item)
        if item.kind == KERNEL:
            kernel = item.source_name, item.names
            self.archs[item.arch] = self.archs.get(item.arch, Share(item.arch)).plus(*more)
            self.kernels[kernel] = self.kernels.get(kernel, Share(*kernel)).plus(*more)


class _Best:
    """The few items of the highest value, of any number that is added."""

    def __init__(self, count: int, value: Callable[[Item], float]) -> None:
        self._count = count
        self._value = value
        self._heap: list[tuple[float, str, Item]] = []

    def add(self, item: Item) -> None:
        ranked = (self._value(item), item.key, item)
        if len(self._heap) < self._count:
            heapq.heappush(self._heap, ranked)
        else:
            heapq.heappushpop(self._heap, ranked)

    def items(self) -> tuple[Item, ...]:
        """Return them, the best first."""
        return tuple(item for _, _, item in sorted(self._heap, reverse=True))


def _top(shares: Iterable[Share], count: int) -> tuple[Share, ...]:
    """Return the largest shares, and the rest as one more."""
    ranked = sorted(shares, key=lambda share: (-share.size, share.name, share.names))
    kept, rest = ranked[:count], ranked[count:]
    if len(rest) == 1:
        return *kept, *rest
    others = Share("", merged=len(rest))
    for share in rest:
        others = others.plus(share.entries, share.size, share.compile_seconds)
    return (*kept, others) if rest else tuple(kept)
