"""Transfer: copies entries of a cache into a bundle, into another backend, or into remotes.

An export and a push read the entries with `chosen`, and a move reads them with `sound_entries`. An
import and a move store what `missing_part` returns.
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

#: The kind, in `Moved.left_out`, of an entry that is larger than the target's cap.
TOO_LARGE = "too_large"
#: Files and directories that a backend leaves in a folder after every entry is gone.
_FILES = ("counters", "lock", "db/data.mdb", "db/lock.mdb", "data.mdb", "lock.mdb", MARKER)
_FOLDERS = ("db", *(f"{shard:02x}" for shard in range(256)), "")


class HasEngine(Protocol):
    """A cache with an engine and settings, such as a `KernelCache`."""

    engine: CacheEngine
    config: Config


def envelope_of(key: str, entry: Entry) -> bytes:
    """Return the envelope of an entry, which is the form in which entries are stored and sent."""
    return encode(key, entry, producer=PRODUCER.encode())


def backend_of(cache: HasEngine, done: str) -> Backend:
    """Return the backend of a cache.

    Args:
        cache: the cache.
        done: a participle for the message of the error, such as "exported".

    Raises:
        BackendError: the cache has no backend.
    """
    if isinstance(cache.engine.backend, NoBackend):
        raise BackendError(f"nothing can be {done}: {cache.engine.backend.reason}")
    return cache.engine.backend


def signer_of(cache: HasEngine) -> Sealer:
    """Return the sealer that signs the entries of a cache for other machines.

    It signs with the private key in the file that the settings of the cache name. If they name no
    file, entries are not signed.

    Raises:
        ConfigError: the key file can't be used, or it has no private key.
    """
    key_file = cache.config.signing_key_file.value
    sealer = make_sealer(key_file)
    if not sealer.can_seal:
        raise ConfigError(f"{key_file} has no private key, so it can't be used to sign")
    return sealer


# -- which entries ---------------------------------------------------------------------------------


Selection = Callable[[Item], bool]


def selection(
    names: Iterable[str] = (),
    archs: Iterable[str] = (),
    used_within: float | str | None = None,
    older_than: float | str | None = None,
) -> Selection | None:
    """Return a function that decides whether a kernel is selected, or None if every entry is.

    A kernel is selected if it satisfies all conditions that are given.

    Args:
        names: the kernel's source name or one of its name expressions must contain one of these
            texts. A text with `*` or `?` is a pattern that must match the whole name.
        archs: the kernel's target must be one of these, such as `"sm_90"` or `"90"`.
        used_within: the kernel must have been used within this time: a number of seconds, or a text
            such as `"30d"`.
        older_than: the kernel must not have been used within this time.

    Raises:
        ConfigError: `used_within` or `older_than` is malformed.
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
    """Yield each sound entry with its description; append the other descriptions to `left_out`.

    The other entries are damaged, unreadable or of another version or program. An entry that was
    deleted in the meantime is skipped.
    """
    for info in infos:
        opened = look_into(backend, info)
        if opened is None:
            continue
        item, entry = opened
        try:
            json.dumps(None if entry is None else dict(entry.metadata), allow_nan=False)
        except ValueError as error:  # a number such as 1e999, which kcache does not store
            item, entry = item._replace(kind=DAMAGED, problem=str(error)), None
        if entry is None:
            left_out.append(item)
        else:
            yield item, entry


def chosen(
    backend: Backend, wanted: Selection | None, left_out: list[Item]
) -> Iterator[tuple[Item, Entry]]:
    """Yield the wanted kernels and their manifests in the order of their keys. Record no use.

    A manifest contains only the dependency sets that lead to one of these kernels. Every entry that
    is not sound is appended to `left_out`, because it can't be known whether the entry is wanted.

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
    """Return the manifest under `key` for a bundle, or None if it leads to none of `kernels`.

    The result has the dependency sets that lead to one of `kernels`, in an order that does not
    depend on when they were stored. It does not have this machine's file stamps.
    """
    dependency_sets = Manifest.from_entry(entry).dependency_sets
    kept = sorted(each.raw for each in dependency_sets if each.result_key(key) in kernels)
    return Manifest([DependencySet(raw) for raw in kept]).to_entry() if kept else None


# -- into another cache ----------------------------------------------------------------------------


def missing_part(engine: CacheEngine, item: Item, entry: Entry) -> tuple[str, Entry | None]:
    """Return a word for how an entry of another cache is imported, and the entry to put, if any.

    The word is `"added"` if this cache does not have the entry, which is then put as it is. It is
    `"merged"` if the entry is a manifest with dependency sets that this cache's manifest does not
    have; the entry to put is then this cache's manifest with these sets added. Otherwise, the word
    is `"present"`, and there is no entry to put.
    """
    there = look_into(engine.backend, EntryInfo(item.key, 0, 0))
    if there is None or there.entry is None:
        return "added", entry
    merged = _merged(there.entry, entry) if item.kind == MANIFEST else None
    return ("present" if merged is None else "merged"), merged


def cost_of(engine: CacheEngine, item: Item, entry: Entry) -> int:
    """Return how many bytes an entry takes in the backend, at most; compression can reduce that."""
    return len(envelope_of(item.key, entry)) + engine.backend.overhead


def put_or_fail(engine: CacheEngine, key: str, entry: Entry) -> bool:
    """Put an entry; return whether it is stored. It is not stored if it is too large.

    Raises:
        BackendError: the backend can't be written to.
    """
    done = engine.put(key, entry)
    if done is Put.FAILED:
        raise BackendError("the backend can't be written to: see the warning above")
    # The memory tier is for entries that this process uses. This entry was only copied.
    engine.memory.delete(key)
    return bool(done)


def _merged(ours: Entry, theirs: Entry) -> Entry | None:
    """Add to the manifest `ours` the dependency sets that only `theirs` has; return the result.

    Return None if there are none to add, or if there is no room for another one.
    """
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
        left_out: entries that were not moved. A move deletes those that are damaged; a copy keeps
            them.
        all: whether no entry is left in the origin.
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

    The two backends together never hold more than the target's cap plus one entry. If an entry
    takes more space in the target than in the origin, the target evicts its least recently used
    entries.

    Processes: Other processes may use both backends. Crash: An entry is stored in the target before
    it is deleted from the origin, so no entry is lost, and the next call moves the rest.

    Args:
        origin: the engine from whose backend entries are moved.
        target: the engine to whose backend entries are moved.
        keep: whether to keep the entries in the origin. Each backend may then be as large as the
            cap.
        advance: a function that is called after each entry.

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
        address: the address of the remote, without credentials.
        kernels, manifests: how many kernels and manifests were stored in the remote.
        failed: how many entries could not be stored.
        reason: why entries could not be stored; empty if all were stored.
        left_out: how many entries were not sent, because they are damaged, unreadable or of another
            version.
    """

    address: str
    kernels: int
    manifests: int
    failed: int
    reason: str
    left_out: int


def push(cache: HasEngine, wanted: Selection | None) -> list[Pushed]:
    """Store the kernels of a cache, and the manifests that lead to them, in each writable remote.

    A push does not count as a use of an entry. If a remote already has a kernel under the same key,
    the kernel is replaced by the equal one of the cache. If a remote already has a manifest, its
    dependency sets are kept, and those of the cache are added. If an entry can't be stored, that is
    counted, and the next entry is sent.

    Args:
        cache: a `KernelCache`.
        wanted: decides which kernels are sent (see `selection`); None for all.

    Raises:
        ConfigError: no remote can be written to, or the key file can't be used to sign.
        BackendError: the cache has no backend, or its entries can't be listed.
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
        # The kernels come first, because a manifest must not lead to a missing kernel.
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
