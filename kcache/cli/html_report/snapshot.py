"""Snapshot: what is known of a cache, gathered in one pass; its parts, and what needs attention.

Gathering changes nothing and does not count as a use of an entry.
"""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, NamedTuple

from kcache._version import __version__
from kcache.directory import CacheDirectory
from kcache.engine.stats import Stats, StatsFile
from kcache.nvrtc import PRODUCER, library
from kcache.nvrtc.inventory import DAMAGED, KERNEL, MANIFEST, UNREADABLE, Item, items
from kcache.util.units import format_size, local_time

if TYPE_CHECKING:
    from kcache import KernelCache


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
) -> Snapshot:
    """Return what is known of the cache in `directory`.

    Args:
        cache: opened for reading.
        directory: of the cache.
        seen: called for each entry that was read.

    Raises:
        BackendError: the entries or the counts can't be read.
    """
    found: list[Item] = []
    for item in items(cache.engine.backend, PRODUCER):
        found.append(item)
        seen()
    return Snapshot(
        written=time.time(),
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


#: Kind of entries, or field of `Stats` -> what was counted, problems first.
_WHAT = {
    DAMAGED: "Damaged entries in the cache",
    UNREADABLE: "Entries that can't be read",
    "corrupt": "Damaged entries met",
    "errors": "Operations that failed",
    "unlocked": "Requests without a lock",
    "rejected": "Entries not cached for lack of room",
    "remote_errors": "Requests without an answer from a remote",
    "evictions": "Entries evicted",
    "uncacheable": "Compiles that must not be cached",
    "wait_timeouts": "Waits that timed out",
    "stale": "Entries that no longer applied",
}
_NOTES = ("evictions", "uncacheable", "wait_timeouts", "stale")
#: ... -> what it means, and what to do.
_DO = {
    DAMAGED: "They are never used. Run kcache verify --repair. If more appear, check the disk.",
    UNREADABLE: "Run kcache verify, which names them, and check permissions and the disk.",
    "corrupt": "Each was compiled again. Run kcache verify. If more appear, check the disk.",
    "errors": "The cache went on without them. kcache doctor and KCACHE_LOG=info say why.",
    "unlocked": "Processes could compile the same kernel twice. Set KCACHE_DIR to a local disk.",
    "rejected": "Each exceeds the cap, or nothing could be evicted for it. Raise KCACHE_MAX_SIZE.",
    "remote_errors": "The kernels were compiled. kcache stats names the remote and the reason.",
    "evictions": "{evicted}. If too many are compiled again, raise the cap, KCACHE_MAX_SIZE.",
    "uncacheable": "The source uses __TIME__, for example. KCACHE_LOG=debug names the reason.",
    "wait_timeouts": "Another process compiled for longer than KCACHE_WAIT, or was stopped.",
    "stale": "A header had changed, or another version of kcache had written them: nothing to do.",
}


def remarks(snapshot: Snapshot) -> list[Remark]:
    """Return the counts that need attention, warnings first."""
    counts = Counter(item.kind for item in snapshot.items) + Counter(snapshot.stats._asdict())
    evicted = format_size(snapshot.stats.bytes_evicted)
    found: list[Remark] = []
    for name in filter(counts.get, _WHAT):
        level, do = NOTE if name in _NOTES else WARNING, _DO[name].format(evicted=evicted)
        found.append(Remark(level, counts[name], _WHAT[name], do))
    return found


# -- parts, and over time --------------------------------------------------------------------------

#: How many targets the bar of the whole cache shows; the others are one part.
_TARGETS = 4
#: The most columns of the chart, and up to which age of a cache they are hours, in seconds.
_COLUMNS, _YOUNG = 90, 2 * 86400
#: The shortest length of a bar whose value is not 0, in percent: 4 pixels on a phone, of which the
#: gap to its neighbour takes 1.5.
_VISIBLE = 1.3


class Share(NamedTuple):
    """What some entries take together.

    Attributes:
        name: of the target or the source; empty if unknown.
        names: name expressions, of a kernel.
        entries: how many.
        size: their stored bytes.
        compile_seconds: what compiling them took.
        merged: how many smaller shares this one combines; 0 for a share with a name.
    """

    name: str
    names: tuple[str, ...]
    entries: int
    size: int
    compile_seconds: float
    merged: int = 0


class Span(NamedTuple):
    """A day or an hour: its name, the kernels compiled in it, and the seconds that they took."""

    title: str
    kernels: int
    compile_seconds: float


def shares(
    items: Iterable[Item], by: Callable[[Item], tuple[str, tuple[str, ...]]], most: int
) -> list[Share]:
    """Return the shares of items with equal names, largest first, the smallest as one more.

    Args:
        items: the entries.
        by: the name and the name expressions that an item counts for.
        most: how many shares have a name.
    """
    groups: dict[tuple[str, tuple[str, ...]], list[Item]] = {}
    for item in items:
        groups.setdefault(by(item), []).append(item)
    ranked = sorted(groups, key=lambda names: (-sum(item.size for item in groups[names]), names))
    kept, rest = (ranked, []) if len(ranked) == most + 1 else (ranked[:most], ranked[most:])
    found = [_share(*names, groups[names]) for names in kept]
    if rest:
        others = [item for names in rest for item in groups[names]]
        found.append(_share("", (), others)._replace(merged=len(rest)))
    return found


def parts(items: Sequence[Item]) -> list[Share]:
    """Return the parts of a whole cache: targets, then manifests, then what is of no use here."""
    kernels = [item for item in items if item.kind == KERNEL]
    found = [
        share._replace(name="Other targets" if share.merged else share.name or "unknown")
        for share in shares(kernels, lambda item: (item.arch, ()), _TARGETS)
    ]
    manifests = [item for item in items if item.kind == MANIFEST]
    others = [item for item in items if item.kind not in (KERNEL, MANIFEST)]
    rest = (("Manifests", manifests), ("Not in use", others))
    return [*found, *(_share(name, (), each) for name, each in rest if each)]


def spans(items: Iterable[Item], now: float, zone: tzinfo | None) -> tuple[str, list[Span]]:
    """Return `"day"` and the days since the first kernel was compiled; of a young cache the hours.

    Args:
        items: kernels.
        now: seconds since the epoch; later compiles are left out.
        zone: the time zone of the days, by default this machine's.
    """
    made = [item for item in items if item.created is not None and item.created <= now]
    first = min((item.created or 0.0 for item in made), default=now)
    hourly = now - first < _YOUNG
    step = timedelta(hours=1) if hourly else timedelta(days=1)

    def start(seconds: float) -> datetime:
        moment = local_time(seconds, zone).replace(minute=0, second=0, microsecond=0, tzinfo=None)
        return moment if hourly else moment.replace(hour=0)

    groups: dict[datetime, list[Item]] = {}
    for item in made:
        groups.setdefault(start(item.created or 0.0), []).append(item)
    count = min(_COLUMNS, (start(now) - start(first)) // step + 1) if made else 0
    found: list[Span] = []
    for back in reversed(range(count)):
        moment = start(now) - back * step
        share = _share("", (), groups.get(moment, []))
        title = f"{moment:%A, %H:%M}" if hourly else f"{moment:%A}, {moment.day} {moment:%B %Y}"
        found.append(Span(title, share.entries, share.compile_seconds))
    return "hour" if hourly else "day", found


def lengths(values: Sequence[float], whole: float) -> list[float]:
    """Return the lengths of the parts of a bar in percent, 100 at most together.

    Every part that is not zero is visible; the larger parts make room for it.
    """
    found = [max(_VISIBLE, 100 * value / whole) if value > 0 else 0.0 for value in values]
    over = sum(found) - 100
    if over <= 0:
        return found
    spare = sum(max(0.0, length - _VISIBLE) for length in found)
    kept = max(0.0, 1 - over / spare) if spare else 1.0
    return [min(length, _VISIBLE + (length - _VISIBLE) * kept) for length in found]


def _share(name: str, names: tuple[str, ...], items: Sequence[Item]) -> Share:
    seconds = sum(item.compile_seconds or 0.0 for item in items)
    return Share(name, names, len(items), sum(item.size for item in items), seconds)
