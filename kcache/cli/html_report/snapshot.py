"""Snapshot: what is known of a cache, gathered in one pass, and which of its counts matter.

Gathering changes nothing and does not count as a use of an entry.
"""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from kcache._version import __version__
from kcache.directory import CacheDirectory
from kcache.engine.stats import Stats, StatsFile
from kcache.nvrtc import PRODUCER, library
from kcache.nvrtc.inventory import DAMAGED, UNREADABLE, Item, items
from kcache.util.units import format_size

if TYPE_CHECKING:
    from kcache import KernelCache

__all__ = ["NOTE", "WARNING", "Remark", "Snapshot", "gather", "remarks"]


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


# -- what needs attention --------------------------------------------------------------------------

#: A `WARNING` is about a problem; a `NOTE` may be about a normal state.
WARNING, NOTE = "Warning", "Note"


class Remark(NamedTuple):
    """One count that is not zero.

    Attributes:
        level: `WARNING` or `NOTE`.
        number: how often.
        what: what was counted, in a few words.
        do: what it means and what to do about it.
    """

    level: str
    number: int
    what: str
    do: str


#: Kind of entries, or field of `Stats` -> level, what was counted, what to do.
_ENTRIES = {
    DAMAGED: (
        *(WARNING, "Damaged entries in the cache"),
        "They are never used. Run kcache verify --repair. If more appear, check the disk.",
    ),
    UNREADABLE: (
        *(WARNING, "Entries that can't be read"),
        "Run kcache verify, which names them, and check permissions and the disk.",
    ),
}
_COUNTS = {
    "corrupt": (
        *(WARNING, "Damaged entries met"),
        "Each was compiled again and replaced. Run kcache verify. If more appear, check the disk.",
    ),
    "errors": (
        *(WARNING, "Operations that failed"),
        "The cache went on without them. kcache doctor and KCACHE_LOG=info say what is wrong.",
    ),
    "unlocked": (
        *(WARNING, "Requests without a lock"),
        "Processes could compile the same kernel twice. Set KCACHE_DIR to a local file system.",
    ),
    "rejected": (
        *(WARNING, "Entries not cached for lack of room"),
        "Each alone exceeds the cap, or nothing could be evicted for it. Raise KCACHE_MAX_SIZE.",
    ),
    "remote_errors": (
        *(WARNING, "Requests without an answer from a remote"),
        "The kernels were compiled instead. kcache stats names the remote and the reason.",
    ),
    "evictions": (
        *(NOTE, "Entries evicted"),
        "{evicted}, to stay under the cap. If too many are compiled again, raise KCACHE_MAX_SIZE.",
    ),
    "uncacheable": (
        *(NOTE, "Compiles that must not be cached"),
        "The source or a header uses __TIME__, for example. KCACHE_LOG=debug names the reason.",
    ),
    "wait_timeouts": (
        *(NOTE, "Waits that timed out"),
        "Another process compiled for longer than KCACHE_WAIT, or was stopped.",
    ),
    "stale": (
        *(NOTE, "Entries that no longer applied"),
        "A header had changed, or another version of kcache had written them: nothing to do.",
    ),
}


def remarks(snapshot: Snapshot) -> list[Remark]:
    """Return the counts that need attention, warnings first."""
    stats = snapshot.stats
    kinds = Counter(item.kind for item in snapshot.items)
    found = [Remark(level, kinds[kind], what, do) for kind, (level, what, do) in _ENTRIES.items()]
    for name, (level, what, do) in _COUNTS.items():
        told = do.format(evicted=format_size(stats.bytes_evicted))
        found.append(Remark(level, getattr(stats, name), what, told))
    return [remark for remark in found if remark.number]
