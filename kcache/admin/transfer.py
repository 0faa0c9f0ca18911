"""Transfer: entries of one cache into another, by a bundle or from backend to backend.

Exports and moves read entries by `sound_entries`. Imports and moves put what `missing_part`
returns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from kcache.backend import Backend, EntryInfo
from kcache.directory import MARKER
from kcache.engine.engine import Put
from kcache.entry import Entry, encode
from kcache.errors import BackendError
from kcache.nvrtc import PRODUCER
from kcache.nvrtc.entries import DAMAGED, MANIFEST, Item, coldest_first, look_into
from kcache.nvrtc.manifest import MAX_SETS, Manifest

if TYPE_CHECKING:
    from kcache.engine.engine import CacheEngine

#: The kind of an entry that takes more room than the target's cap.
TOO_LARGE = "too_large"
#: Files and directories that a backend leaves in a folder after every entry is gone.
_FILES = ("counters", "lock", "db/data.mdb", "db/lock.mdb", "data.mdb", "lock.mdb", MARKER)
_FOLDERS = ("db", *(f"{shard:02x}" for shard in range(256)), "")


def sound_entries(
    backend: Backend, infos: Iterable[EntryInfo], left_out: list[Item]
) -> Iterator[tuple[Item, Entry]]:
    """Yield the entries that can be read, and append the others to `left_out`."""
    for info in infos:
        opened = look_into(backend, info)
        if opened is None:
            continue
        item, entry = opened
        try:
            json.dumps(None if entry is None else dict(entry.metadata), allow_nan=False)
        except ValueError as error:  # such as 1e999: kcache did not store it
            item, entry = item._replace(kind=DAMAGED, problem=str(error)), None
        if entry is None:
            left_out.append(item)
        else:
            yield item, entry


def missing_part(engine: CacheEngine, item: Item, entry: Entry) -> tuple[str, Entry | None]:
    """Return what happens to a foreign entry (`added`, `present`, `merged`), and what to put.

    What the cache has stays: its own copy of an entry, and all dependency sets of a manifest, to
    which the others are added.
    """
    there = look_into(engine.backend, EntryInfo(item.key, 0, 0))
    if there is None or there.entry is None:
        return "added", entry
    merged = _merged(there.entry, entry) if item.kind == MANIFEST else None
    return ("present" if merged is None else "merged"), merged


def cost_of(engine: CacheEngine, item: Item, entry: Entry) -> int:
    """Return how many bytes of the cap an entry may take; a backend may compress it."""
    return len(encode(item.key, entry, producer=PRODUCER.encode())) + engine.backend.overhead


def put_or_fail(engine: CacheEngine, key: str, entry: Entry) -> bool:
    """Put an entry; return whether it is stored.

    Raises:
        BackendError: the backend can't be written to.
    """
    done = engine.put(key, entry)
    if done is Put.FAILED:
        raise BackendError("the backend can't be written to: see the warning above")
    # A use by another process does not count as one by this.
    engine.memory.delete(key)
    return bool(done)


def _merged(ours: Entry, theirs: Entry) -> Entry | None:
    """Return our manifest with the dependency sets of theirs; None if there is none to add."""
    sets = Manifest.from_entry(ours).dependency_sets
    known = {each.identity for each in sets}
    given = Manifest.from_entry(theirs).dependency_sets
    missing = [each for each in given if each.identity not in known]
    missing = missing[: max(0, MAX_SETS - len(sets))]
    return Manifest([*sets, *missing]).to_entry() if missing else None


class Moved(NamedTuple):
    """The result of `move_entries`.

    Attributes:
        entries, size: how many, and their bytes in the origin.
        evicted: bytes that were evicted from the origin before.
        left_out: entries that were not moved. Damaged ones are deleted, unless it copies.
    """

    entries: int
    size: int
    evicted: int
    left_out: tuple[Item, ...]


def move_entries(
    origin: CacheEngine,
    target: CacheEngine,
    *,
    keep: bool = False,
    advance: Callable[[], object] = lambda: None,
) -> Moved:
    """Move every entry from one engine's backend to another's, the least recently used one first.

    Both together never hold more than the target's cap and one entry: if an entry takes more space
    in the target than in the origin, the target evicts its coldest entries.

    Processes: others may use both backends. Crash: an entry is in the target before it leaves the
    origin, so none is lost, and the next call moves the rest.

    Args:
        origin: where the entries are.
        target: their destination.
        keep: copy the entries. Then each backend may be as large as the cap.
        advance: called after each entry.

    Raises:
        BackendError: the entries can't be listed, or the target can't be written to.
    """
    cap, left_out, moved, size, evicted = target.max_size, list[Item](), 0, 0, 0
    if not keep and origin.size_bytes + target.size_bytes > cap:
        evicted = origin.trim(max(0, cap - target.size_bytes))
    try:
        for item, entry in sound_entries(origin.backend, coldest_first(origin.backend), left_out):
            _, wanted = missing_part(target, item, entry)
            if wanted is not None and not keep:
                room = cap - origin.backend.usage().bytes + item.size
                target.max_size = min(cap, max(room, cost_of(target, item, wanted)))
            if wanted is not None and not put_or_fail(target, item.key, wanted):
                left_out.append(item._replace(kind=TOO_LARGE))
            else:
                moved, size = moved + 1, size + item.size
                if not keep:
                    origin.delete(item.key, noted=False)
            advance()
    finally:
        target.max_size = cap
    for item in left_out:
        if item.kind == DAMAGED and not keep:
            origin.delete(item.key, noted=False)
    return Moved(moved, size, evicted, tuple(left_out))


def remove_emptied(folder: str) -> None:
    """Remove the remains of a backend in its folder, and the folder if nothing else is in it.

    It deletes only names that backends write, no folder with content, and nothing through a link.
    """
    if os.path.islink(folder) or os.path.islink(os.path.join(folder, "db")):
        return
    for name in _FILES:
        with suppress(OSError):
            os.unlink(os.path.join(folder, name))
    for name in _FOLDERS:
        with suppress(OSError):
            os.rmdir(os.path.join(folder, name))
