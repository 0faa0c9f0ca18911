"""Prometheus: writes the statistics in its text exposition format, version 0.0.4.

It follows https://prometheus.io/docs/instrumenting/exposition_formats/ and the naming rules there:
counters end in `_total`, units are seconds and bytes. Its functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kcache.remote.counts import COUNTS

if TYPE_CHECKING:
    from kcache.backend import Usage
    from kcache.engine.stats import Stats

__all__ = ["exposition"]

#: Field of `Stats` -> name of the counter and its meaning.
_COUNTERS = {
    "hits": ("hits", "Requests answered from the cache."),
    "memory_hits": ("memory_hits", "Those of the hits that the in-process tier answered."),
    "misses": ("misses", "Requests that the cache could not answer."),
    "compiles": ("compiles", "Compiles that succeeded."),
    "uncacheable": ("uncacheable", "Compiles whose result must not be cached."),
    "puts": ("puts", "Entries written."),
    "evictions": ("evictions", "Entries evicted to stay under the cap."),
    "bytes_evicted": ("evicted_bytes", "Stored bytes of the evicted entries."),
    "stale": ("stale", "Entries found that no longer apply."),
    "corrupt": ("corrupt", "Entries found damaged."),
    "rejected": ("rejected", "Entries not stored for lack of room below the cap."),
    "errors": (
        "errors",
        "Operations of the backend that failed; no request failed because of them.",
    ),
    "compile_seconds": ("compile_seconds", "Time spent in compiles that succeeded."),
    "saved_seconds": ("saved_seconds", "Compile time that hits made unnecessary."),
    "hit_seconds": ("hit_seconds", "Time spent in hits."),
    "coalesced": ("coalesced", "Requests that waited for another's compile and got its outcome."),
    "wait_timeouts": (
        "wait_timeouts",
        "Requests that waited for another compile until the time limit.",
    ),
    "unlocked": ("unlocked", "Requests that could not lock their key between processes."),
    "proofs": ("proofs", "Compiles that only showed whether a kernel is good in another location."),
    "layer_hits": ("layer_hits", "Those of the hits that a layer answered."),
    "remote_hits": ("remote_hits", "Those of the hits that a remote answered."),
    "remote_misses": ("remote_misses", "Requests for which no remote had a kernel."),
    "remote_errors": (
        "remote_errors",
        "Requests that a remote did not answer, and no other one could.",
    ),
    "remote_puts": ("remote_puts", "Kernels handed to the agent, to be put to the remotes."),
}


def exposition(
    stats: Stats,
    usage: Usage,
    max_size: int,
    about: Mapping[str, str],
    tiers: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return counters, gauges and one info metric, every line ended.

    Args:
        stats: the counts.
        usage: the stored bytes and entries.
        max_size: the cap in bytes.
        about: labels of `kcache_info`.
        tiers: the agent's counts of each remote; their metrics have the label `tier`.
    """
    lines: list[str] = []
    labels = ",".join(f'{name}="{_label(value)}"' for name, value in about.items())
    lines += _metric("info", "gauge", "Which cache this is about; always 1.", 1, f"{{{labels}}}")
    for field, (name, meaning) in _COUNTERS.items():
        lines += _metric(f"{name}_total", "counter", meaning, getattr(stats, field))
    lines += _metric("entries", "gauge", "Entries stored.", usage.entries)
    lines += _metric("size_bytes", "gauge", "Stored bytes.", usage.bytes)
    lines += _metric("max_size_bytes", "gauge", "The cap on the stored bytes.", max_size)
    for name, meaning in COUNTS.items() if tiers else ():
        full = f"kcache_tier_{name}_total"
        lines += (f"# HELP {full} {meaning[0].upper()}{meaning[1:]}.", f"# TYPE {full} counter")
        for tier in tiers:
            lines.append(
                f'{full}{{tier="{_label(str(tier["address"]))}"}} {int(tier.get(name, 0))}'
            )
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, meaning: str, value: float, labels: str = "") -> Iterator[str]:
    full = f"kcache_{name}"
    yield f"# HELP {full} {meaning}"
    yield f"# TYPE {full} {kind}"
    # Not the repr: for a size, that is the text that the user wrote.
    yield f"{full}{labels} {value}"


def _label(value: str) -> str:
    r"""Return a label's value with `\`, `"` and line ends escaped; non-Unicode is replaced."""
    text = value.encode("utf-8", "replace").decode()
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
