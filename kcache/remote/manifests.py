"""Manifests: merges the header sets of one request from several machines.

A manifest's entry has the sections `set0`, `set1`, ... (see `kcache.nvrtc.manifest`); the other
sections are one machine's stamps of its own files. They mean nothing on another machine, and would
reveal paths to it.
"""

from __future__ import annotations

from kcache.entry import Entry

__all__ = ["merged", "portable"]

#: As `kcache.nvrtc.manifest.MAX_SETS`, which readers go by.
MAX_SETS = 16


def _sets(entry: Entry) -> list[bytes]:
    found: list[bytes] = []
    while (raw := entry.payload.get(f"set{len(found)}")) is not None:
        found.append(raw)
    return found


def _entry(sets: list[bytes]) -> Entry:
    payload = {f"set{number}": raw for number, raw in enumerate(sets[:MAX_SETS])}
    return Entry(payload, {"kind": "manifest"})


def portable(entry: Entry) -> Entry:
    """Return a manifest without one machine's stamps of its files."""
    return _entry(_sets(entry))


def merged(old: Entry, new: Entry) -> Entry | None:
    """Return a manifest with the header sets of both, the new ones first; None if all are in `old`.

    If there are more than `MAX_SETS`, the oldest are dropped.
    """
    known, added = _sets(old), _sets(new)
    missing = [raw for raw in added if raw not in known]
    return _entry(missing + known) if missing else None
