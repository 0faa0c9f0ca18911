"""Bundle import: puts the entries of a bundle into a cache."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from kcache.admin.bundles import HasEngine, contents, sealer_of, verified
from kcache.backend import NoBackend
from kcache.bundle.files import Source, opened
from kcache.engine.eviction import LOW_WATER
from kcache.engine.key_locks import KeyLocks
from kcache.entry import encode
from kcache.errors import BackendError, ConfigError
from kcache.nvrtc.inventory import MANIFEST, Opened, look_at
from kcache.nvrtc.manifest import MAX_SETS, Manifest

if TYPE_CHECKING:
    from kcache.bundle.reader import Bundle
    from kcache.engine.engine import CacheEngine
    from kcache.entry import Entry
    from kcache.remote.seal import Sealer

__all__ = ["Imported", "import_bundle"]

#: How long an import waits for a process that compiles for the same manifest, in seconds. Then it
#: merges the manifest without the lock. At worst one header set is lost, which costs one compile.
_PATIENCE = 5.0
_PAUSE = 0.01


class Imported(NamedTuple):
    """The result of an import.

    Attributes:
        added: entries that were not there.
        present: entries that were there; the cache keeps its own.
        merged: manifests that were there, and got more header sets.
        no_room: entries that were left out, because the rest of the bundle fills the cap.
        other_version: entries that another version of kcache made.
    """

    added: int = 0
    present: int = 0
    merged: int = 0
    no_room: int = 0
    other_version: int = 0


def import_bundle(cache: HasEngine, source: Source) -> Imported:
    """Put the entries of a bundle into a cache.

    All of the bundle is read and checked before the first entry is written, so a malformed one
    leaves the cache as it was. The cache keeps what it has: its own copy of an entry, and all
    header sets of a manifest, to which the bundle's are added. The cap holds: older entries are
    evicted for new ones, and an entry that would evict other parts of the bundle is left out. Other
    processes may use the cache meanwhile; an import that was killed is simply run again.

    A bundle is code that will run on your GPU. With `KCACHE_SIGNING_KEY_FILE` only entries that one
    of those keys has signed are accepted. Without it nothing shows who made a bundle.

    Args:
        cache: a `KernelCache` that may write.
        source: path of the bundle, or a binary file; a pipe is copied to a temporary file first.

    Raises:
        ConfigError: the cache is open for reading only, or the file of keys can't be used.
        BundleError: it is no bundle, a damaged one, or not signed with one of the keys.
        BackendError: the cache can't be written to.
        OSError: the bundle can't be read.
    """
    engine = cache.engine
    if engine.read_only:
        raise ConfigError("the cache is open for reading only: nothing can be imported")
    engine.backend.usage()  # raises where there is no backend
    if isinstance(engine.backend, NoBackend):
        raise BackendError(f"nothing can be imported: {engine.backend.reason}")
    with opened(source) as bundle:
        return _Import(engine, bundle, sealer_of(cache.config)).run()


class _Import:
    """One import; for one thread. `run` verifies everything, then puts kernels, then manifests."""

    def __init__(self, engine: CacheEngine, bundle: Bundle, sealer: Sealer | None) -> None:
        self._engine = engine
        self._bundle = bundle
        self._sealer = sealer
        #: How many bytes may be stored: less than an eviction leaves, so that no eviction takes an
        #: entry of this import.
        self._room = int(engine.max_size * LOW_WATER)
        self._counts = dict.fromkeys(Imported._fields, 0)

    def run(self) -> Imported:
        """Verify, then put.

        Raises:
            BundleError, BackendError, OSError: as `import_bundle`.
        """
        manifests: set[str] = set()

        def note(found: Opened) -> None:
            if found.item.kind == MANIFEST:
                manifests.add(found.item.key)

        about = verified(self._bundle, self._sealer, note)
        self._counts["other_version"] = about.other_version
        # The kernels come first: a manifest must not promise a kernel that is not there.
        for found in contents(self._bundle, self._sealer):
            if found.entry is not None and found.item.key not in manifests:
                self._put(found.item.key, found.entry)
        if manifests:
            for found in contents(self._bundle, self._sealer):
                if found.entry is not None and found.item.key in manifests:
                    self._merge(found.item.key, found.entry)
        return Imported(**self._counts)

    def _put(self, key: str, entry: Entry) -> None:
        if self._there(key) is not None:
            self._count("present")
        elif self._store(key, entry):
            self._count("added")

    def _merge(self, key: str, entry: Entry) -> None:
        with self._locked(key):
            there = self._there(key)
            if there is None:
                if self._store(key, entry):
                    self._count("added")
                return
            ours, theirs = Manifest.from_entry(there), Manifest.from_entry(entry)
            known = {each.raw for each in ours.header_sets}
            missing = [each for each in theirs.header_sets if each.raw not in known]
            merged = Manifest([*ours.header_sets, *missing][:MAX_SETS])
            if len(merged.header_sets) == len(ours.header_sets):
                self._count("present")
            elif self._store(key, merged.to_entry()):
                self._count("merged")

    def _there(self, key: str) -> Entry | None:
        """Return the cache's own entry if it is sound, read without recording a use."""
        from kcache.backend import EntryInfo

        blob = self._engine.backend.get(key)
        if blob is None:
            return None
        return look_at(blob, EntryInfo(key, len(blob), 0), self._engine.producer).entry

    def _store(self, key: str, entry: Entry) -> bool:
        """Put an entry, unless the bundle has filled the cap; tell whether it is stored.

        Raises:
            BackendError: the cache can't be written to.
        """
        engine = self._engine
        cost = len(encode(key, entry, producer=engine.producer.encode())) + engine.backend.overhead
        if cost > self._room:
            self._count("no_room")
            return False
        errors = engine.stats().errors
        if engine.put(key, entry):
            # A use by another process does not count as a use by this one.
            engine.memory.delete(key)
            self._room -= cost
            return True
        if engine.stats().errors > errors:
            raise BackendError("the cache can't be written to: see the warning above")
        self._count("no_room")
        return False

    def _count(self, what: str) -> None:
        self._counts[what] += 1

    @contextmanager
    def _locked(self, key: str) -> Generator[None]:
        """Keep other processes from storing the same manifest during the block."""
        path = self._engine.lock_file
        if path is None:
            yield
            return
        locks = KeyLocks(path)
        until = time.monotonic() + _PATIENCE
        try:
            with suppress(OSError):  # this file system has no locks
                while not locks.acquire(key) and time.monotonic() < until:
                    time.sleep(_PAUSE)
            yield
        finally:
            locks.release(key)
            locks.close()
