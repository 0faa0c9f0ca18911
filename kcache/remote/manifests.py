"""Manifests: merges the header sets of one request from several machines.

A manifest's entry has the sections `set0`, `set1`, ... (see `kcache.nvrtc.manifest`); the other
sections are one machine's stamps of its own files. They mean nothing on another machine, and would
reveal paths to it.
"""

from __future__ import annotations

from kcache.entry import Entry

__all__ = ["merged", "portable"]

#: The same as `kcache.nvrtc.manifest.MAX_SETS`, the limit of the readers.
MAX_SETS = 16
#: Bytes of an entry beside its header sets, at most.
_ROOM = 2048


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


def merged(old: Entry, new: Entry, most: int | None = None) -> Entry | None:
    """Return a manifest with the header sets of both, the new ones first; None if all are in `old`.

    If there are more than `MAX_SETS`, or more than `most` bytes of them, the oldest are dropped.
    The first one stays.
    """
    known, added = _sets(old), _sets(new)
    missing = [raw for raw in added if raw not in known]
    if not missing:
        return None
    sets = missing + known
    while most is not None and len(sets) > 1 and sum(map(len, sets)) + _ROOM > most:
        sets.pop()
    return _entry(sets)
