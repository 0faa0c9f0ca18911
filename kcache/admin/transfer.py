"""Transfer: copies entries from one cache to another: by a bundle, to a backend, to remotes.

Exports and pushes read entries with `chosen`, and moves with `sound_entries`. Imports and moves
put what `missing_part` returns.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple, Protocol

from kcache.backend import Backend, EntryInfo, NoBackend
from kcache.config import Config
from kcache.directory import MARKER
from kcache.engine.engine import CacheEngine, Put
from kcache.entry import MAX_SETS, Entry, encode
from kcache.errors import BackendError, ConfigError
from kcache.nvrtc import PRODUCER
from kcache.nvrtc.entries import DAMAGED, KERNEL, MANIFEST, Item, coldest_first, look_into
from kcache.nvrtc.manifest import DependencySet, Manifest
from kcache.remote.guarded_storage import GuardedStorage
from kcache.remote.signing import Sealer, make_sealer
from kcache.util.units import parse_age

#: The kind of an entry that takes more room than the target's cap.
TOO_LARGE = "too_large"
#: Files and directories that a backend leaves in a folder after every entry is gone.
_FILES = ("counters", "lock", "db/data.mdb", "db/lock.mdb", "data.mdb", "lock.mdb", MARKER)
_FOLDERS = ("db", *(f"{shard:02x}" for shard in range(256)), "")


class HasEngine(Protocol):
    """A cache: `KernelCache` is one."""

    engine: CacheEngine
    config: Config


def envelope_of(key: str, entry: Entry) -> bytes:
    """Return an entry in the form in which it is stored and sent."""
    return encode(key, entry, producer=PRODUCER.encode())


def backend_of(cache: HasEngine, done: str) -> Backend:
    """Return the backend of a cache.

    Raises:
        BackendError: the cache has no backend. `done` is a participle for the message, such as
            "exported".
    """
    if isinstance(cache.engine.backend, NoBackend):
        raise BackendError(f"nothing can be {done}: {cache.engine.backend.reason}")
    return cache.engine.backend


def signer_of(cache: HasEngine) -> Sealer:
    """Return what signs entries for other machines, with the key that the settings name.

    Raises:
        ConfigError: the file of keys can't be used, or has no key that can sign.
    """
    key_file = cache.config.signing_key_file.value
    sealer = make_sealer(key_file)
    if not sealer.can_seal:
        raise ConfigError(f"{key_file} has no key that can sign")
    return sealer


# -- which entries ---------------------------------------------------------------------------------


Selection = Callable[[Item], bool]


def selection(
    names: Iterable[str] = (),
    archs: Iterable[str] = (),
    used_within: float | str | None = None,
    older_than: float | str | None = None,
) -> Selection | None:
    """Return which kernels are wanted, as a function; None if every entry is.

    Args:
        names: texts, one of which must be in the kernel's source name or one of its name
            expressions. A text with `*` or `?` is a pattern that must match all of the name.
        archs: targets, such as `"sm_90"` or `"90"`, one of which must be the kernel's.
        used_within: the kernel's last use must be at most so many seconds ago, or `"30d"`.
        older_than: the kernel's last use must be longer ago than this.

    Raises:
        ConfigError: an age is malformed.
    """
    texts = tuple(names)
    targets = {f"sm_{arch}" if arch[:1].isdigit() else arch for arch in archs}
    now = time.time()
    first = 0.0 if used_within is None else now - parse_age(used_within, name="used_within")
    last = math.inf if older_than is None else now - parse_age(older_than, name="older_than")

    def is_wanted(item: Item) -> bool:
        known = (item.source_name, *item.names)
        return (
            item.kind == KERNEL
            and first <= item.used < last
            and (not targets or item.arch in targets)
            and (not texts or any(_fits(text, name) for text in texts for name in known))
        )

    return is_wanted if texts or targets or (first, last) != (0.0, math.inf) else None


def _fits(pattern: str, name: str) -> bool:
    if not set(pattern) & set("*?"):
        return pattern in name
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))  # arrays, not sets of characters


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


def chosen(
    backend: Backend, wanted: Selection | None, left_out: list[Item]
) -> Iterator[tuple[Item, Entry]]:
    """Yield the entries for a bundle, by ascending key; no use of them is recorded.

    A manifest is included with the dependency sets that lead to an included kernel. Entries that
    match the filters but can't be included are appended to `left_out`.

    Raises:
        BackendError: the entries can't be listed.
    """
    infos = sorted(backend.scan())
    keys = {info.key for info in infos}
    if wanted is not None:  # every entry has to be read to decide
        looked = (look_into(backend, info) for info in infos)
        keys = {each.item.key for each in looked if each is not None and wanted(each.item)}
    for item, entry in sound_entries(backend, infos, left_out):
        if item.kind == MANIFEST:
            manifest = portable(item.key, entry, keys)
            if manifest is not None:
                yield item, manifest
        elif item.key in keys:
            yield item, entry


def portable(key: str, entry: Entry, kernels: Collection[str]) -> Entry | None:
    """Return the manifest under `key` for a bundle, or None if it leads to no kernel.

    The result has the dependency sets that lead to one of `kernels`, in an order that does not
    depend on when they were stored, and without this machine's file stamps.
    """
    dependency_sets = Manifest.from_entry(entry).dependency_sets
    kept = sorted(each.raw for each in dependency_sets if each.result_key(key) in kernels)
    return Manifest([DependencySet(raw) for raw in kept]).to_entry() if kept else None


# -- into another cache ----------------------------------------------------------------------------


def missing_part(engine: CacheEngine, item: Item, entry: Entry) -> tuple[str, Entry | None]:
    """Return what happens to a foreign entry (`added`, `present`, `merged`), and what to put.

    The cache keeps its own copy of an entry. It keeps all dependency sets of a manifest, and the
    foreign ones are added.
    """
    there = look_into(engine.backend, EntryInfo(item.key, 0, 0))
    if there is None or there.entry is None:
        return "added", entry
    merged = _merged(there.entry, entry) if item.kind == MANIFEST else None
    return ("present" if merged is None else "merged"), merged


def cost_of(engine: CacheEngine, item: Item, entry: Entry) -> int:
    """Return how many bytes of the cap an entry may take; a backend may compress it."""
    return len(envelope_of(item.key, entry)) + engine.backend.overhead


def put_or_fail(engine: CacheEngine, key: str, entry: Entry) -> bool:
    """Put an entry; return whether it is stored.

    Raises:
        BackendError: the backend can't be written to.
    """
    done = engine.put(key, entry)
    if done is Put.FAILED:
        raise BackendError("the backend can't be written to: see the warning above")
    # The memory tier has what this process uses, and it has only copied this entry.
    engine.memory.delete(key)
    return bool(done)


def _merged(ours: Entry, theirs: Entry) -> Entry | None:
    """Return our manifest with their dependency sets added; None if there is none to add."""
    sets = Manifest.from_entry(ours).dependency_sets
    known = {each.identity for each in sets}
    given = Manifest.from_entry(theirs).dependency_sets
    missing = [each for each in given if each.identity not in known]
    missing = missing[: max(0, MAX_SETS - len(sets))]
    return Manifest([*sets, *missing]).to_entry() if missing else None


class Moved(NamedTuple):
    """The result of `move_entries`.

    Attributes:
        entries, size: how many entries were moved, and their bytes in the origin.
        evicted: bytes that were evicted from the origin before the move.
        left_out: entries that were not moved. A move deletes damaged entries, a copy does not.
        all: whether nothing is left in the origin.
    """

    entries: int = 0
    size: int = 0
    evicted: int = 0
    left_out: tuple[Item, ...] = ()
    all: bool = False


def move_entries(
    origin: CacheEngine,
    target: CacheEngine,
    *,
    keep: bool = False,
    advance: Callable[[], object] = lambda: None,
) -> Moved:
    """Move every entry from one engine's backend to another's, the least recently used one first.

    The two backends together never hold more than the target's cap and one entry. If an entry takes
    more space in the target than in the origin, the target evicts its coldest entries.

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
    return Moved(moved, size, evicted, tuple(left_out), not origin.backend.usage().entries)


def remove_emptied(folder: str) -> None:
    """Remove the remains of a backend in its folder, and the folder if nothing else is in it.

    Only files that backends write and empty folders are removed. No symbolic link is followed.
    """
    if os.path.islink(folder) or os.path.islink(os.path.join(folder, "db")):
        return
    for remove, names in ((os.unlink, _FILES), (os.rmdir, _FOLDERS)):
        for name in names:
            with suppress(OSError):
                remove(os.path.join(folder, name))


# -- into remotes ----------------------------------------------------------------------------------


class Pushed(NamedTuple):
    """The result of a push to one remote.

    Attributes:
        address: of the remote, without credentials.
        kernels, manifests: how many are stored there now.
        failed: how many entries could not be stored.
        reason: why, if anything failed.
        left_out: how many are damaged, unreadable or of another version, and were not sent.
    """

    address: str
    kernels: int
    manifests: int
    failed: int
    reason: str
    left_out: int


def push(cache: HasEngine, wanted: Selection | None) -> list[Pushed]:
    """Store the kernels of a cache, and the manifests that lead to them, in each writable remote.

    This does not count as a use of an entry. A kernel replaces the equal one that the remote may
    have under the same key. The remote's manifests keep their dependency sets. A failure is
    counted, and the other entries are still sent.

    Args:
        cache: a `KernelCache`.
        wanted: which kernels; None for all.

    Raises:
        ConfigError: no remote can be written to, or the key file can't be used to sign.
        BackendError: the entries can't be listed.
    """
    writable = [address for address in cache.config.remotes if address.writable]
    if not writable:
        raise ConfigError("KCACHE_REMOTE has no address that can be written to")
    sealer, backend = signer_of(cache), backend_of(cache, "pushed")
    return [
        _push_to(GuardedStorage(address, lambda: sealer), backend, wanted) for address in writable
    ]


def _push_to(remote: GuardedStorage, backend: Backend, wanted: Selection | None) -> Pushed:
    left_out: list[Item] = []
    sent: Counter[bool | None] = Counter()
    try:
        # The kernels come first: a manifest must not promise a kernel that is not there.
        for manifests in (False, True):
            for item, entry in chosen(backend, wanted, left_out):
                if (item.kind == MANIFEST) is manifests:
                    store = remote.merge if manifests else remote.put
                    stored = store(item.key, envelope_of(item.key, entry))
                    sent[manifests if stored else None] += 1
    finally:
        remote.close()
    reason = remote.trouble if sent[None] else ""
    address, odd = remote.address.redacted(), len(set(left_out))
    return Pushed(address, sent[False], sent[True], sent[None], reason, odd)
