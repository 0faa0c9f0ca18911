"""Bundle contents: decides which entries of a cache go into a bundle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from kcache.admin.filters import Filters, is_wanted
from kcache.backend import Backend, EntryInfo
from kcache.bundle.format import MAX_VALUE
from kcache.entry import Entry, encode
from kcache.nvrtc.inventory import MANIFEST, Item, look_into
from kcache.nvrtc.manifest import Manifest, StoredHeaderSet

__all__ = ["chosen", "pairs", "portable"]

#: Fields that say when and how fast an entry was made. They differ from build to build.
_TIMES = ("created", "compile_seconds")


def chosen(
    backend: Backend, producer: str, filters: Filters, clock: Callable[[], float] = time.time
) -> tuple[list[EntryInfo], set[str]]:
    """Return the candidate entries by ascending key, and the keys of those that are wanted.

    With filters, it reads every entry to decide. A manifest is never wanted for itself; without
    filters its key is among the wanted ones, which has no effect.

    Raises:
        BackendError: the entries can't be listed.
    """
    infos = sorted(backend.scan())
    if filters == Filters():
        return infos, {info.key for info in infos}
    now = clock()
    looked: list[EntryInfo] = []
    wanted: set[str] = set()
    for info in infos:
        opened = look_into(backend, info, producer)
        if opened is None or opened.entry is None:
            continue
        if opened.item.kind == MANIFEST:
            looked.append(info)
        elif is_wanted(opened.item, filters, now):
            looked.append(info)
            wanted.add(info.key)
    return looked, wanted


def pairs(
    backend: Backend,
    producer: str,
    filters: Filters,
    *,
    reproducible: bool,
    problem: Callable[[Item], object],
) -> Iterator[tuple[str, bytes, str]]:
    """Yield key, envelope and kind of each entry for a bundle, by ascending key.

    Args:
        backend: whose entries; no use is recorded.
        producer: of the entries; others are left out.
        filters: which kernels. Only the manifests that lead to them are included.
        reproducible: leave out when and how fast a kernel was compiled.
        problem: called for each entry that is damaged, unreadable, too large, or of another
            producer.

    Raises:
        BackendError: the entries can't be listed.
    """
    infos, wanted = chosen(backend, producer, filters)
    for info in infos:
        opened = look_into(backend, info, producer)
        if opened is None:
            continue
        item, entry = opened
        if entry is None:
            problem(item)
            continue
        if item.kind == MANIFEST:
            entry = portable(info.key, entry, wanted)
        elif info.key not in wanted:
            continue
        elif reproducible:
            entry = _timeless(entry)
        if entry is None:
            continue
        envelope = encode(info.key, entry, producer=producer.encode())
        if len(envelope) > MAX_VALUE:
            problem(item._replace(problem=f"larger than {MAX_VALUE} bytes"))
            continue
        yield info.key, envelope, item.kind


def portable(key: str, entry: Entry, kernels: Iterable[str]) -> Entry | None:
    """Return the manifest under `key` for a bundle, or None if it leads to no kernel.

    It has the header sets that lead to one of `kernels`, in an order that doesn't tell when they
    were stored, and none of this machine's file stamps.
    """
    known = kernels if isinstance(kernels, (set, frozenset)) else set(kernels)
    header_sets = Manifest.from_entry(entry).header_sets
    kept = sorted(each.raw for each in header_sets if each.result_key(key) in known)
    return Manifest([StoredHeaderSet(raw) for raw in kept]).to_entry() if kept else None


def _timeless(entry: Entry) -> Entry:
    metadata = {name: value for name, value in entry.metadata.items() if name not in _TIMES}
    return Entry(entry.payload, metadata)
