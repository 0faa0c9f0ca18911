"""Info: the text that `print_info` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from kcache.errors import KcacheError
from kcache.nvrtc.inventory import KERNEL, MANIFEST, items
from kcache.other_backends import Holder, amount
from kcache.remote.counts import COUNTS
from kcache.util.units import counted, format_size, format_time

if TYPE_CHECKING:
    from kcache.engine.engine import CacheEngine
    from kcache.engine.stats import Stats

__all__ = ["Kinds", "count_kinds", "format_info", "one_line", "remote_lines", "stats_lines"]


#: How many entries are read to tell kernels from manifests. 2,000 entries take 0.06 s with LMDB and
#: 0.15 s as files. Keys are digests, so the first keys are a fair sample: with 2,000, the result is
#: off by 1 %.
_READ = 2000


class Kinds(NamedTuple):
    """The number of entries of each kind.

    Attributes:
        kernels: entries that are kernels.
        manifests: those that lead from a source with includes to its kernels.
        others: damaged ones, and those of another version of kcache or another program.
        read: how many were read. If that is less than all, the other numbers are estimates.
    """

    kernels: int
    manifests: int
    others: int
    read: int

    @property
    def all(self) -> int:
        """All entries."""
        return self.kernels + self.manifests + self.others


def count_kinds(engine: CacheEngine, producer: str) -> Kinds:
    """Return the number of entries of each kind: exact up to 2,000 entries, else an estimate.

    Reading records no use of an entry.

    Raises:
        BackendError: the entries can't be listed.
    """
    entries = engine.entry_count
    seen = Counter(item.kind for item in islice(items(engine.backend, producer), _READ))
    read = seen.total()
    share = entries / read if read == _READ < entries else 1
    kernels, manifests = round(seen[KERNEL] * share), round(seen[MANIFEST] * share)
    every = entries if share > 1 else read
    return Kinds(kernels, manifests, max(0, every - kernels - manifests), read)


def one_line(engine: CacheEngine, *, directory: str | None, backend: str) -> str:
    """Return where a cache is and how full it is, as `repr` shows it; raises nothing."""
    try:
        usage = engine.backend.usage()
    except (KcacheError, OSError):
        entries, size = "unknown", "unknown"
    else:
        entries, size = str(usage.entries), format_size(usage.bytes)
    size = f"{size} of {format_size(engine.max_size)}"
    return f"{directory!r}, backend={backend!r}, entries={entries}, size={size!r}"


def format_info(
    engine: CacheEngine,
    *,
    directory: str,
    backend: str,
    stats: Stats | None = None,
    kinds: Kinds | None = None,
    elsewhere: Sequence[Holder] = (),
) -> str:
    """Return where a cache is, how full it is and what it has done, one line per figure.

    Args:
        engine: of the cache.
        directory: of the cache.
        backend: its name.
        stats: the counts, if they are not those of the engine itself.
        kinds: the number of entries of each kind, if that was counted.
        elsewhere: other backends in the directory that have entries.
    """
    usage = f"{format_size(engine.size_bytes)} of {format_size(engine.max_size)}"
    share = engine.size_bytes / engine.max_size
    lines = [
        ("directory", directory),
        ("backend", backend),
        *(("elsewhere", f"{amount(each)} in {each.name}") for each in elsewhere),
        ("entries", str(engine.entry_count)),
        *_kinds_lines(kinds),
        ("size", f"{usage} ({share:.1%})"),
        *stats_lines(engine.stats() if stats is None else stats),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def _kinds_lines(kinds: Kinds | None) -> Iterator[tuple[str, str]]:
    if kinds is not None:
        how = "" if kinds.read >= kinds.all else f" (estimated from {kinds.read} entries)"
        yield "kernels", f"{kinds.kernels}{how}"
        yield "manifests", f"{kinds.manifests}{how}"
        if kinds.others:
            yield "others", f"{kinds.others}{how}"


def stats_lines(stats: Stats) -> list[tuple[str, str]]:
    """Return (name, text) of every figure, in the order in which they are printed."""
    disk = stats.hits - stats.memory_hits - stats.layer_hits - stats.remote_hits
    lines = [
        ("hits", f"{stats.hits} ({stats.memory_hits} from memory, {disk} from the backend)"),
        ("misses", str(stats.misses)),
        ("hit rate", f"{stats.hit_rate:.1%}" if stats.requests else "-"),
        ("average compile time", _mean(stats.avg_compile_time_ms, stats.compiles)),
        ("average cache time", _mean(stats.avg_cache_time_ms, stats.hits)),
        ("compile time saved", format_time(stats.saved_seconds)),
        ("evictions", f"{stats.evictions} ({format_size(stats.bytes_evicted)})"),
        ("corrupt", str(stats.corrupt)),
        ("stale", str(stats.stale)),
        ("uncacheable", str(stats.uncacheable)),
        ("rejected", str(stats.rejected)),
        ("errors", str(stats.errors)),
        ("coalesced", f"{stats.coalesced} ({stats.wait_timeouts} timed out)"),
    ]
    if stats.layer_hits:
        lines.append(("layers", counted(stats.layer_hits, "hit", "hits")))
    if stats.remote_hits or stats.remote_misses or stats.remote_errors or stats.remote_puts:
        hits = counted(stats.remote_hits, "hit", "hits")
        asked = f"{hits}, {counted(stats.remote_misses, 'miss', 'misses')}"
        lines.append(("remotes", f"{asked}, {stats.remote_errors} without an answer"))
        lines.append(("remote puts", str(stats.remote_puts)))
    return lines


def _mean(milliseconds: float, samples: int) -> str:
    """Return a mean time, or a dash if there is nothing to average."""
    return format_time(milliseconds / 1e3) if samples else "-"


def remote_lines(tiers: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return (address, counts) of each remote; zeros are left out."""
    lines: list[tuple[str, str]] = []
    for tier in tiers:
        told = [f"{tier[name]} {name}" for name in COUNTS if tier.get(name)]
        state = f"{tier['breaker']}: {tier['reason']}" if tier.get("reason") else ""
        lines.append((str(tier["address"]), ", ".join([*told, *filter(None, [state])]) or "-"))
    return lines
