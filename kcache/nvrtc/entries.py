"""Entries: reads, checks and describes the entries of a backend; this does not count as a use.

All functions read through `Backend.scan` and `Backend.get`, one entry at a time, and change
nothing. Entries that are deleted meanwhile are left out; damaged entries are described as such.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from kcache.backend import Backend, EntryInfo
from kcache.entry import Entry, decode
from kcache.errors import BackendError, CorruptEntryError, IncompatibleEntryError
from kcache.nvrtc import PRODUCER, names_and_log
from kcache.nvrtc.manifest import Manifest
from kcache.nvrtc.metadata import flags_of, number_of, text_of, texts_of
from kcache.nvrtc.request import title_of

if TYPE_CHECKING:
    from kcache.entry import JSON

#: Kinds of entries. An `OTHER` entry is undamaged, but was written by another version or program,
#: or its kind is unknown. An `UNREADABLE` entry can't be read from the backend (an I/O error).
KERNEL, MANIFEST, OTHER = "kernel", "manifest", "other"
DAMAGED, UNREADABLE = "damaged", "unreadable"

#: Exceptions that may be raised by reading an entry that kcache did not write.
_FORGED = (LookupError, TypeError, ValueError, ArithmeticError, RecursionError, MemoryError)


class Item(NamedTuple):
    """The description of one entry.

    Attributes:
        key: the entry's key, 64 hexadecimal digits.
        size: the stored size in bytes, as `Backend.usage` counts it.
        used: the time of the last recorded use, in seconds since the epoch.
        kind: one of `KERNEL`, `MANIFEST`, `OTHER`, `DAMAGED` and `UNREADABLE`.
        problem: why lookups ignore the entry; empty if they use it.
        source_name: the name of the kernel's source. This attribute and the following ones are
            empty if they are unknown, or if the entry is not a kernel.
        names: the names of all its kernels: name expressions first, then names in the module.
        arch: the target architecture.
        created: when it was compiled, in seconds since the epoch; None if unknown.
        compile_seconds: how long the compile took, in seconds; None if unknown.
        flags: the options of the compile without the target.
        compiler: the identity of the compiler.
    """

    key: str
    size: int
    used: float
    kind: str
    problem: str = ""
    source_name: str = ""
    names: tuple[str, ...] = ()
    arch: str = ""
    created: float | None = None
    compile_seconds: float | None = None
    flags: tuple[str, ...] = ()
    compiler: str = ""

    @property
    def title(self) -> str:
        """The source's name and the names of the kernels, as `title_of` combines them."""
        return title_of(self.source_name, self.names)


class Opened(NamedTuple):
    """The description of an entry, and the entry itself; `entry` is None if it can't be used."""

    item: Item
    entry: Entry | None


def look_into(backend: Backend, info: EntryInfo) -> Opened | None:
    """Read, check and describe one entry; return None if it no longer exists.

    If the entry is a manifest, its dependency sets are checked, too.
    """
    try:
        blob = backend.get(info.key)
    except BackendError as error:
        kind = DAMAGED if isinstance(error, CorruptEntryError) else UNREADABLE
        return Opened(_item(info)._replace(kind=kind, problem=str(error)), None)
    return None if blob is None else look_at(blob, info)


def look_at(blob: bytes, info: EntryInfo) -> Opened:
    """Check and describe the entry in `blob`, which `Backend.get` returned, as `look_into` does."""
    item = _item(info)
    try:
        entry = decode(blob, info.key, producer=PRODUCER.encode())
        described = describe(item, entry.metadata)
        if described.kind == MANIFEST:
            for dependency_set in Manifest.from_entry(entry).dependency_sets:
                dependency_set.answers()
        elif described.kind == KERNEL:
            names_and_log(entry)
    except IncompatibleEntryError as error:
        return Opened(item._replace(problem=str(error)), None)
    except CorruptEntryError as error:
        return Opened(item._replace(kind=DAMAGED, problem=str(error)), None)
    except _FORGED as error:  # a valid checksum over data that no version of kcache wrote
        problem = f"{type(error).__name__}: {error}"
        return Opened(item._replace(kind=DAMAGED, problem=problem), None)
    return Opened(described, entry)


def _item(info: EntryInfo) -> Item:
    return Item(info.key, info.size, info.used_ns / 1e9, OTHER)


def items(backend: Backend) -> Iterator[Item]:
    """Yield a description of every entry, in any order.

    Raises:
        BackendError: the entries can't be listed.
    """
    for info in backend.scan():
        opened = look_into(backend, info)
        if opened is not None:
            yield opened.item


def describe(item: Item, metadata: Mapping[str, JSON]) -> Item:
    """Return a copy of `item`, with its kind and its other fields taken from `metadata`.

    The metadata may have any content: a value of a wrong type is treated as unknown.
    """
    kind = metadata.get("kind")
    if kind == MANIFEST:
        return item._replace(kind=MANIFEST)
    return item._replace(
        kind=KERNEL if kind == KERNEL else OTHER,
        source_name=text_of(metadata.get("source_name")),
        names=texts_of(metadata.get("functions")),
        arch=text_of(metadata.get("arch")),
        created=number_of(metadata.get("created")),
        compile_seconds=number_of(metadata.get("compile_seconds")),
        flags=flags_of(metadata.get("flags")),
        compiler=sys.intern(text_of(metadata.get("compiler"))),
    )


def matching(backend: Backend, prefixes: Iterable[str]) -> dict[str, list[EntryInfo]]:
    """Return, for each of `prefixes`, the entries whose keys begin with it, sorted by key.

    Raises:
        BackendError: the entries can't be listed.
    """
    found: dict[str, list[EntryInfo]] = {prefix: [] for prefix in prefixes}
    for info in backend.scan():
        for prefix, infos in found.items():
            if info.key.startswith(prefix):
                infos.append(info)
    return {prefix: sorted(infos) for prefix, infos in found.items()}


def unique_length(keys: Iterable[str], *, least: int = 8) -> int:
    """Return how many leading digits distinguish `keys` from each other, but at least `least`."""
    pairs = pairwise(sorted(keys))
    alike = (len(os.path.commonprefix(pair)) for pair in pairs)  # noqa: RUF071  digits, no paths
    return max(least, 1 + max(alike, default=0))


def coldest_first(backend: Backend) -> list[EntryInfo]:
    """Return all entries in the exact order of use, least recently used first.

    Raises:
        BackendError: the entries can't be listed.
    """
    return sorted(backend.scan(), key=attrgetter("used_ns", "key"))


def would_evict(backend: Backend, goal: int | None, *, since_ns: float = 0) -> tuple[int, int]:
    """Return how many entries and bytes a trim would evict. Nothing is evicted.

    Args:
        backend: the backend with the entries.
        goal: the trim ends when the entries have at most this many bytes; None to evict only the
            entries that are too old.
        since_ns: a time in nanoseconds since the epoch. Entries that were last used before this
            time are too old, and are evicted in any case.

    Raises:
        BackendError: the entries can't be listed.
    """
    left = backend.usage().bytes
    count = freed = 0
    for info in coldest_first(backend):
        if info.used_ns >= since_ns and (goal is None or left - freed <= goal):
            break
        count += 1
        freed += info.size
    return count, freed
