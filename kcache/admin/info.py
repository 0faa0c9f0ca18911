"""The text that `print_info` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kcache.errors import KcacheError
from kcache.remote.counts import COUNTS
from kcache.util.units import counted, format_size, format_time

if TYPE_CHECKING:
    from kcache.engine.engine import CacheEngine
    from kcache.engine.stats import Stats

__all__ = ["format_info", "one_line", "remote_lines", "stats_lines"]


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
    engine: CacheEngine, *, directory: str, backend: str, stats: Stats | None = None
) -> str:
    """Return where a cache is, how full it is and what it has done, one line per figure.

    `stats` stands for what the engine itself has done, where that is not what is wanted.
    """
    usage = f"{format_size(engine.size_bytes)} of {format_size(engine.max_size)}"
    share = engine.size_bytes / engine.max_size
    lines = [
        ("directory", directory),
        ("backend", backend),
        ("entries", str(engine.entry_count)),
        ("size", f"{usage} ({share:.1%})"),
        *stats_lines(engine.stats() if stats is None else stats),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def stats_lines(stats: Stats) -> list[tuple[str, str]]:
    """Return (name, text) of every figure, in the order in which they are printed."""
    disk = stats.hits - stats.memory_hits - stats.layer_hits - stats.remote_hits
    lines = [
        ("hits", f"{stats.hits} ({stats.memory_hits} from memory, {disk} from the backend)"),
        ("misses", str(stats.misses)),
        ("hit rate", f"{stats.hit_rate:.1%}"),
        ("average compile time", format_time(stats.avg_compile_time_ms / 1e3)),
        ("average cache time", format_time(stats.avg_cache_time_ms / 1e3)),
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


def remote_lines(tiers: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return (address, what was counted of it) of each remote; zeros are left out."""
    lines: list[tuple[str, str]] = []
    for tier in tiers:
        told = [f"{tier[name]} {name}" for name in COUNTS if tier.get(name)]
        state = f"{tier['breaker']}: {tier['reason']}" if tier.get("reason") else ""
        lines.append((str(tier["address"]), ", ".join([*told, *filter(None, [state])]) or "-"))
    return lines
