"""Info: where a cache is, how full it is and what it has done, as text and for Prometheus."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from kcache.backend import Usage
from kcache.engine.engine import CacheEngine
from kcache.engine.stats import FIELDS, Stats
from kcache.nvrtc.entries import KERNEL, MANIFEST, items
from kcache.remote.daemon_protocol import COUNTS
from kcache.util.units import counted, format_size, format_time

#: How many entries are read, at most, to count kernels and manifests. 2,000 entries take 0.06 s
#: with LMDB and 0.15 s as files. Keys are digests, so the entries that are listed first are a fair
#: sample. With 2,000 of them, the result is off by 1 %.
_READ = 2000


class Kinds(NamedTuple):
    """The number of entries of each kind.

    Attributes:
        kernels: the number of kernels.
        manifests: the number of manifests, which lead from a source with includes to its kernels.
        others: the number of damaged entries, and of entries of another version of kcache or of
            another program.
        read: how many entries were read. If these are not all entries, the other numbers are
            estimates.
    """

    kernels: int
    manifests: int
    others: int
    read: int

    @property
    def all(self) -> int:
        """The number of all entries."""
        return self.kernels + self.manifests + self.others


def count_kinds(engine: CacheEngine) -> Kinds:
    """Return the number of entries of each kind, which is an estimate above 2,000 entries.

    No use of an entry is recorded.

    Raises:
        BackendError: the entries can't be listed.
    """
    entries = engine.entry_count
    seen = Counter(item.kind for item in islice(items(engine.backend), _READ))
    read = seen.total()
    share = entries / read if read == _READ < entries else 1
    kernels, manifests = round(seen[KERNEL] * share), round(seen[MANIFEST] * share)
    every = entries if share > 1 else read
    return Kinds(kernels, manifests, max(0, every - kernels - manifests), read)


def format_info(engine: CacheEngine, *, directory: str, backend: str) -> str:
    """Return where a cache is, how full it is and what this process did, one line per figure."""
    lines = cache_lines(engine, directory=directory, backend=backend) + stats_lines(engine.stats())
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def cache_lines(
    engine: CacheEngine, *, directory: str, backend: str, kinds: Kinds | None = None
) -> list[tuple[str, str]]:
    """Return where a cache is and how full it is, as pairs of a name and a text.

    Args:
        engine: the engine of the cache.
        directory: the directory of the cache.
        backend: the name of the backend.
        kinds: the number of entries of each kind, or None if they were not counted.
    """
    usage = f"{format_size(engine.size_bytes)} of {format_size(engine.max_size)}"
    words = "" if kinds is None else f" ({kinds_in_words(kinds)})"
    return [
        ("directory", directory),
        ("backend", backend),
        ("entries", f"{engine.entry_count:,}{words}"),
        ("size", f"{usage} ({engine.size_bytes / engine.max_size:.1%})"),
    ]


def kinds_in_words(kinds: Kinds) -> str:
    """Return the numbers of entries in words, such as `"2 kernels, 1 manifest"`."""
    parts = [counted(kinds.kernels, "kernel"), counted(kinds.manifests, "manifest")]
    if kinds.others:
        parts.append(counted(kinds.others, "other"))
    if kinds.read < kinds.all:
        parts.append(f"estimated from {counted(kinds.read)}")
    return ", ".join(parts)


def stats_lines(stats: Stats) -> list[tuple[str, str]]:
    """Return every figure in the statistics as a pair of a name and a text, in printing order."""
    lines = [
        ("hits", f"{stats.hits:,} ({hit_sources(stats)})"),
        ("misses", f"{stats.misses:,}"),
        ("hit rate", f"{stats.hit_rate:.1%}" if stats.requests else "-"),
        ("average compile time", _mean(stats.avg_compile_time_ms, stats.compiles)),
        ("average cache time", _mean(stats.avg_cache_time_ms, stats.hits)),
        ("compile time saved", format_time(stats.saved_seconds)),
        ("evictions", f"{counted(stats.evictions)}, {format_size(stats.bytes_evicted)}"),
        ("corrupt", counted(stats.corrupt)),
        ("stale", counted(stats.stale)),
        ("uncacheable", counted(stats.uncacheable, "compile")),
        ("rejected", counted(stats.rejected)),
        ("errors", counted(stats.errors, "operation")),
        ("coalesced", f"{counted(stats.coalesced, 'request')}, {stats.wait_timeouts:,} timed out"),
    ]
    if stats.remote_hits or stats.remote_misses or stats.remote_errors or stats.remote_puts:
        asked = f"{counted(stats.remote_hits, 'hit')}, "
        asked += f"{counted(stats.remote_misses, 'miss')}, "
        asked += f"{stats.remote_errors:,} without an answer; "
        lines.append(("remotes", asked + counted(stats.remote_puts, "put")))
    return lines


def hit_sources(stats: Stats) -> str:
    """Return in words how many hits came from memory, the backend, layers and remotes.

    The numbers add up to `stats.hits`.
    """
    elsewhere = stats.layer_hits + stats.remote_hits
    parts = [
        f"{stats.memory_hits:,} from memory",
        f"{stats.hits - stats.memory_hits - elsewhere:,} from the backend",
    ]
    if stats.layer_hits:
        parts.append(f"{stats.layer_hits:,} from layers")
    if stats.remote_hits:
        parts.append(f"{stats.remote_hits:,} from remotes")
    return ", ".join(parts)


def _mean(milliseconds: float, samples: int) -> str:
    """Return a mean time as text, or a dash if there are no samples."""
    return format_time(milliseconds / 1e3) if samples else "-"


def remote_lines(remotes: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the address of each remote, with a text about its counts and its last failure.

    Counts that are zero are left out.
    """
    lines: list[tuple[str, str]] = []
    for remote in remotes:
        parts = [f"{remote[name]} {name}" for name in COUNTS if remote.get(name)]
        state = f"{remote['breaker']}: {remote['reason']}" if remote.get("reason") else ""
        lines.append((str(remote["address"]), ", ".join([*parts, *filter(None, [state])]) or "-"))
    return lines


# -- for Prometheus --------------------------------------------------------------------------------


def exposition(
    stats: Stats,
    usage: Usage,
    max_size: int,
    about: Mapping[str, str],
    remotes: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return counters, gauges and one info metric in Prometheus' text format 0.0.4.

    The format is that of https://prometheus.io/docs/instrumenting/exposition_formats/, with
    Prometheus' rules for names: counters end in `_total`, and units are seconds and bytes.

    Args:
        stats: the statistics of the cache.
        usage: the stored bytes and entries.
        max_size: the cap in bytes.
        about: the labels of the metric `kcache_info`; maps names to values.
        remotes: the status of each remote, from the daemon. A remote's metrics have its address as
            the label `tier`.
    """
    lines: list[str] = []
    labels = ",".join(f'{name}="{_label(value)}"' for name, value in about.items())
    about_this = "Which cache this is about; always 1."
    lines += _metric("info", "gauge", about_this, {f"{{{labels}}}": 1})
    for field, meaning in meanings().items():
        count = {"": getattr(stats, field)}
        lines += _metric(f"{counter_name(field)}_total", "counter", meaning, count)
    lines += _metric("entries", "gauge", "Entries stored.", {"": usage.entries})
    lines += _metric("size_bytes", "gauge", "Stored bytes.", {"": usage.bytes})
    lines += _metric("max_size_bytes", "gauge", "The cap on the stored bytes.", {"": max_size})
    tiers = {f'{{tier="{_label(str(remote["address"]))}"}}': remote for remote in remotes}
    for name, meaning in COUNTS.items() if remotes else ():
        counts = {label: int(remote.get(name, 0)) for label, remote in tiers.items()}
        sentence = f"{meaning[0].upper()}{meaning[1:]}."
        lines += _metric(f"tier_{name}_total", "counter", sentence, counts)
    return "\n".join(lines) + "\n"


def counter_name(field: str) -> str:
    """Return the name of the counter for a field of `Stats`. In Prometheus, units come last."""
    return "evicted_bytes" if field == "bytes_evicted" else field


def meanings() -> dict[str, str]:
    """Return the meaning of each field of `Stats` as a sentence, from its docstring."""
    parts = re.split(r"\n {4}(\w+): ", inspect.cleandoc(Stats.__doc__ or ""))
    texts = {n: " ".join(text.split()) for n, text in zip(parts[1::2], parts[2::2], strict=True)}
    found = ((name, texts.get(name, name)) for name in FIELDS)  # `python -OO` has no docstrings
    return {name: f"{text[0].upper()}{text[1:].rstrip('.')}." for name, text in found}


def _metric(name: str, kind: str, meaning: str, values: Mapping[str, float]) -> Iterator[str]:
    """Yield the lines of a metric. `values` maps the labels of each line to its value."""
    full = f"kcache_{name}"
    yield f"# HELP {full} {meaning}"
    yield f"# TYPE {full} {kind}"
    for labels, value in values.items():
        # The repr would be wrong: for a size from a setting, it is the text that the user wrote.
        yield f"{full}{labels} {value}"


def _label(value: str) -> str:
    r"""Return the value of a label with `\`, `"` and line ends escaped.

    Characters that can't be encoded in UTF-8 are replaced.
    """
    text = value.encode("utf-8", "replace").decode()
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
