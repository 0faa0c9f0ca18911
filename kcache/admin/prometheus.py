"""Prometheus: writes the statistics in its text exposition format, version 0.0.4.

It follows https://prometheus.io/docs/instrumenting/exposition_formats/ and the naming rules there:
counters end in `_total`, units are seconds and bytes. Its functions are pure.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kcache.engine.stats import FIELDS, Stats
from kcache.remote.protocol import COUNTS

if TYPE_CHECKING:
    from kcache.backend import Usage

__all__ = ["counter_name", "exposition"]


def exposition(
    stats: Stats,
    usage: Usage,
    max_size: int,
    about: Mapping[str, str],
    remotes: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return counters, gauges and one info metric, every line ended.

    Args:
        stats: the counts.
        usage: the stored bytes and entries.
        max_size: the cap in bytes.
        about: labels of `kcache_info`.
        remotes: the service's counts of each remote; their metrics have the label `tier`.
    """
    lines: list[str] = []
    labels = ",".join(f'{name}="{_label(value)}"' for name, value in about.items())
    lines += _metric("info", "gauge", "Which cache this is about; always 1.", 1, f"{{{labels}}}")
    for field, meaning in _meanings().items():
        lines += _metric(f"{counter_name(field)}_total", "counter", meaning, getattr(stats, field))
    lines += _metric("entries", "gauge", "Entries stored.", usage.entries)
    lines += _metric("size_bytes", "gauge", "Stored bytes.", usage.bytes)
    lines += _metric("max_size_bytes", "gauge", "The cap on the stored bytes.", max_size)
    for name, meaning in COUNTS.items() if remotes else ():
        full = f"kcache_tier_{name}_total"
        lines += (f"# HELP {full} {meaning[0].upper()}{meaning[1:]}.", f"# TYPE {full} counter")
        for remote in remotes:
            lines.append(
                f'{full}{{tier="{_label(str(remote["address"]))}"}} {int(remote.get(name, 0))}'
            )
    return "\n".join(lines) + "\n"


def counter_name(field: str) -> str:
    """Return the name of the counter for a field of `Stats`: its unit is at its end."""
    return "evicted_bytes" if field == "bytes_evicted" else field


def _meanings() -> dict[str, str]:
    """Return the meaning of each field of `Stats`, from its docstring."""
    told = re.split(r"\n {4}(\w+): ", inspect.cleandoc(Stats.__doc__ or ""))
    meanings = dict(zip(told[1::2], told[2::2], strict=True))
    found = {name: " ".join(meanings.get(name, name).split()).rstrip(".") for name in FIELDS}
    return {name: f"{text[0].upper()}{text[1:]}." for name, text in found.items()}


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
