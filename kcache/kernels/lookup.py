"""Lookup: looks for the kernel of a request, in one tier after the other.

A tier has entries under keys. `LocalTier` is the memory and the backend of the user's own cache.
`SharedTier` is either all read-only directories and bundles, or all remotes; their entries are
checked like those of the user's own cache. `find_in` looks into one tier after the other, and
returns a `Lookup`. `Tiers.hit` counts and logs a hit, once for each request. `resolver` handles a
miss.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kcache.engine.engine import Damaged, Put
from kcache.engine.stats import DISK, MEMORY
from kcache.entry import decode
from kcache.errors import CorruptEntryError
from kcache.kernels.compiled_kernel import CompiledKernel
from kcache.nvrtc.request import title_of
from kcache.util import log
from kcache.util.forks import importing

if TYPE_CHECKING:
    from kcache.config import Config
    from kcache.engine.engine import CacheEngine
    from kcache.entry import Entry
    from kcache.nvrtc.files import FileDigests
    from kcache.nvrtc.manifest import DependencySet, Manifest
    from kcache.nvrtc.request import Request
    from kcache.readonly.directory_tier import Tier


class Lookup(NamedTuple):
    """What the tiers have for one request.

    Attributes:
        kernel: the kernel, or None.
        tier: the tier that has the kernel: `memory`, `disk`, `layer` or `remote`.
        seconds: how long the compile of the kernel took.
        dependency_set: what the kernel depends on; it matches the present files. None for a source
            that reads no file.
        manifest: if there is no kernel, the request's manifest that was read last from the first
            tier; None if none was read.
        damaged: the entries that were found during the lookup but can't be used.
        changed: whether no dependency set in the first tier matches the present files, although one
            matched earlier at this location.
        location: the location of the request. The kernel's log and dependencies have its paths.
    """

    kernel: CompiledKernel | None
    tier: str = ""
    seconds: float = 0.0
    dependency_set: DependencySet | None = None
    manifest: Manifest | None = None
    damaged: Damaged = []  # noqa: RUF012  of a tuple, never changed
    changed: bool = False
    location: str = ""


class LocalTier:
    """The user's own cache: the memory tier of this process, then the backend.

    Threads: may be called from several threads at the same time. Fork: a forked child may use it.

    Args:
        engine: the engine of the cache.
        once: whether the headers of a request are checked only once while its manifest is in
            memory.
        peek: whether to change nothing: no use of an entry is recorded, and nothing is stored in
            memory or in the backend.
    """

    def __init__(self, engine: CacheEngine, *, once: bool = False, peek: bool = False) -> None:
        self.engine = engine
        self.once = once
        self._fetch = engine.peek if peek else engine.fetch
        self._peeks = peek
        #: `digests.reads` when `keep` last had stamps to store.
        self._reads = 0
        self._digests: FileDigests | None = None

    @property
    def digests(self) -> FileDigests:
        """The digests of the files that were read to verify headers."""
        # Not a `cached_property`: that of Python 3.11 has a lock, which a fork may leave locked.
        if self._digests is None:
            with importing:
                from kcache.nvrtc.files import FileDigests  # noqa: PLC0415  as in `manifest_type`

                self._digests = self._digests or FileDigests()
        return self._digests

    def kernel(
        self, request: Request, key: str, dependency_set: DependencySet | None, damaged: Damaged
    ) -> Lookup | None:
        """Return the kernel under `key`, or None; an unusable entry is added to `damaged`."""
        slot, tier = self._fetch(key, damaged)
        if slot is None:
            return None
        found: Lookup | None = slot.decoded
        if found is None or found.location != request.location:
            found = _decoded(request, slot.value, key, dependency_set, damaged)
            slot.decoded = found
        return found if tier is MEMORY or found is None else found._replace(tier=tier)

    def manifests(self, request: Request, damaged: Damaged) -> Iterator[tuple[Manifest, bool]]:
        """Yield the manifest in memory, then the manifest in the backend, each in a pair with True.

        True is the argument `keep` for the method `keep`. The backend is also read because another
        process may have stored the dependency set of the present headers there, after this process
        had read the manifest into memory.
        """
        manifest, tier = self._manifest(request.key, damaged)
        if manifest is not None:
            yield manifest, True
        if tier is MEMORY:
            manifest, _ = self._manifest(request.key, damaged, memory=False)
            if manifest is not None:
                yield manifest, True

    def keep(
        self, request: Request, manifest: Manifest, holding: DependencySet, *, keep: bool
    ) -> None:
        """Store the stamps of `holding`, so that other processes need not read the files again.

        Nothing is stored if `keep` is false, or if no file had to be read to verify `holding`.
        """
        if keep and self.digests.reads != self._reads:
            self._reads = self.digests.reads
            if not self._peeks and holding.remember(request):
                self.put(request.key, manifest.to_entry(), decoded=manifest)

    def merge(
        self, request: Request, dependency_sets: Sequence[DependencySet], *, keep: bool = True
    ) -> Put:
        """Add dependency sets to the request's manifest; the last one must match the present files.

        Without `keep`, the manifest is stored in memory only.
        """
        old, _ = self._manifest(request.key, [], memory=not keep)
        manifest = manifest_type()([] if old is None else [*old.dependency_sets])
        for each in dependency_sets:
            manifest.add(each)
        manifest.checked[request.location] = dependency_sets[-1]
        dependency_sets[-1].remember(request)
        return self.put(request.key, manifest.to_entry(), decoded=manifest, keep=keep)

    def put(self, key: str, entry: Entry, *, decoded: object = None, keep: bool = True) -> Put:
        """Store an entry; without `keep`, or if the cache can't store it, put it only into memory.

        In a tier that peeks, nothing is stored, not even in memory.
        """
        done = Put.FAILED
        if not self._peeks:
            done = self.engine.put(key, entry, decoded=decoded) if keep else done
            if not done:
                self.engine.memory.put(key, entry, entry.size, decoded=decoded)
        return done

    def _manifest(
        self, key: str, damaged: Damaged, *, memory: bool = True
    ) -> tuple[Manifest | None, str]:
        """Return (manifest or None, `MEMORY` or `DISK`), like `CacheEngine.fetch` for entries."""
        slot, tier = self._fetch(key, damaged, memory=memory)
        if slot is None:
            return None, tier
        manifest: Manifest | None = slot.decoded
        if manifest is None:
            manifest = _manifest_of(slot.value, key, damaged)
            if manifest is not None and not self._peeks:
                self.engine.memory.put(
                    key, slot.value, slot.value.size, decoded=manifest, touch_at=slot.touch_at
                )
        return manifest, tier


class SharedTier:
    """Read-only directories and bundles, or remotes, as one tier.

    The members return entries without checking them. This class checks the entries and compares the
    headers. A kernel that it finds is stored in memory, and also in the user's own cache if the
    address of its member has the option `keep`.

    Threads: may be called from several threads at the same time. Fork: a forked child may use it if
    it may use the members.

    Args:
        local: the user's own cache.
        members: the directories and bundles, or the remotes; `close` closes them.
        name: `layer` or `remote`.
    """

    once = False

    def __init__(self, local: LocalTier, members: Tier, name: str) -> None:
        self._local = local
        self._members = members
        self._name = name

    @property
    def digests(self) -> FileDigests:
        """The digests of the files that were read to verify headers."""
        return self._local.digests

    def kernel(
        self, request: Request, key: str, dependency_set: DependencySet | None, damaged: Damaged
    ) -> Lookup | None:
        """Return the kernel under `key` after storing it, or None if no member has a valid one.

        Raises:
            Exception: any exception that a member raises. `manifests` and `entries` raise the same.
        """
        for entry, keep in self.entries(key, damaged):
            found = _decoded(request, entry, key, dependency_set, damaged)
            if found is not None:
                self._local.put(key, entry, keep=keep)
                return found._replace(tier=self._name)
        return None

    def manifests(self, request: Request, damaged: Damaged) -> Iterator[tuple[Manifest, bool]]:
        """Yield each manifest of the request, and whether its member has the option `keep`.

        The stamps of files are left out, because another machine has recorded them.
        """
        for entry, keep in self.entries(request.key, damaged):
            manifest = _manifest_of(entry, request.key, damaged)
            if manifest is not None:
                yield manifest.without_stamps(), keep

    def keep(
        self, request: Request, manifest: Manifest, holding: DependencySet, *, keep: bool
    ) -> None:
        """Merge `manifest` into the manifest of the user's own cache.

        `holding` is the dependency set in it that matches the present files.
        """
        others = [each for each in manifest.dependency_sets if each is not holding]
        self._local.merge(request, (*reversed(others), holding), keep=keep)

    def entries(self, key: str, damaged: Damaged) -> Iterator[tuple[Entry, bool]]:
        """Yield each valid entry under `key`, and whether its member has the option `keep`.

        The errors of the other entries are added to `damaged`.
        """
        producer = self._local.engine.producer.encode()
        for _, envelope, keep, problem in self._members.offers(key):
            try:
                if problem is not None:
                    raise problem
                yield decode(envelope, key, producer=producer), keep
            except CorruptEntryError as error:
                damaged.append((key, error))

    def close(self) -> None:
        """Close the members. Idempotent."""
        self._members.close()


def find_in(tiers: Sequence[LocalTier | SharedTier], request: Request) -> Lookup:
    """Look up `request` in one tier after the other until a kernel is found; count nothing."""
    damaged: Damaged = []
    if request.self_contained:
        for tier in tiers:
            found = tier.kernel(request, request.key, None, damaged)
            if found is not None:
                return found._replace(damaged=damaged) if damaged else found
        return Lookup(None, damaged=damaged)
    manifest, changed = None, False
    for tier in tiers:
        once = tier.once and request.start is None  # a build always checks its files
        for read, keep in tier.manifests(request, damaged):
            holding = read.holding(request, tier.digests, once=once)
            if tier is tiers[0]:
                manifest = read
                changed = holding is None and read.was_checked_at(request.location)
            if holding is not None:
                found = tier.kernel(request, holding.result_key(request.key), holding, damaged)
                if found is not None:
                    tier.keep(request, read, holding, keep=keep)
                    return found._replace(damaged=damaged) if damaged else found
    return Lookup(None, manifest=manifest, damaged=damaged, changed=changed)


class Tiers:
    """The tiers that are searched before a compile: the user's own cache, then read-only tiers.

    Requests are counted here, not in the engine, because one request may need several gets.

    Threads: may be called from several threads at the same time. Fork: a forked child may use it.

    Args:
        engine: the engine of the user's own cache.
        config: the settings.
        peek: see `LocalTier`.

    Attributes:
        engine: as given.
        local: the user's own cache.
        reads: whether kernels are looked up; false if the setting `disable` or `recache` is on.
        all: the user's own cache, then the read-only directories and bundles, if there are any. A
            miss in a directory or bundle is not remembered, because entries may be added to it
            while this program runs.
    """

    def __init__(self, engine: CacheEngine, config: Config, *, peek: bool = False) -> None:
        self.engine = engine
        self.local = LocalTier(engine, once=config.header_check.value == "once", peek=peek)
        self.reads = not (config.disable.value or config.recache.value)
        self.all: tuple[LocalTier | SharedTier, ...] = (self.local,)
        if config.layers and (self.reads or peek):
            with importing:
                from kcache.kernels.tiers import open_read_only_tiers  # noqa: PLC0415  2 ms

            members = open_read_only_tiers(config, engine.report)
            if members is not None:
                self.all = self.local, SharedTier(self.local, members, "layer")
        self._counts_misses = not config.disable.value

    def hit(
        self,
        request: Request,
        started: float | None = None,
        *,
        found: Lookup | None = None,
        is_retry: bool = False,
    ) -> CompiledKernel | None:
        """Return the kernel of a request, counted and logged as a hit, or None if there is none.

        Args:
            request: the request.
            started: when the request began, by `time.perf_counter`; None for now.
            found: the result of an earlier lookup. If it is None, the request is looked up here,
                unless `reads` is false.
            is_retry: whether an earlier call has counted the stale and damaged entries for this
                request; then they are not counted again.
        """
        if started is None:
            started = time.perf_counter()
        if found is None:
            if not self.reads:
                return None
            found = find_in(self.all, request)
        kernel = found.kernel
        if (found.damaged or found.changed) and not is_retry:
            for key, error in found.damaged:
                self.engine.refuse(key, error)
            self.engine.counters.add("stale", found.changed)
        if kernel is not None:
            elapsed = time.perf_counter() - started
            self.engine.counters.hit(kernel.key, found.seconds, elapsed, found.tier)
            if "logging" in sys.modules and log.debugging():
                _log_hit(request, kernel, found.tier)
        return kernel

    def lookup(self, request: Request) -> Lookup:
        """Return what the tiers have for a request, even if `reads` is false; count nothing."""
        return find_in(self.all, request)

    def miss(self) -> None:
        """Count a request that the cache could not answer."""
        if self._counts_misses:
            self.engine.counters.add("misses")

    def adopted(self, kernel: CompiledKernel) -> CompiledKernel:
        """Count a hit for a kernel that another request has just obtained; return it as cached."""
        self.engine.counters.hit(kernel.key, kernel.compile_seconds, 0.0, MEMORY)
        return kernel._replace(cached=True)

    def close(self) -> None:
        """Close the read-only tiers. Idempotent."""
        for tier in self.all:
            if isinstance(tier, SharedTier):
                tier.close()


def _decoded(
    request: Request,
    entry: Entry,
    key: str,
    dependency_set: DependencySet | None,
    damaged: Damaged,
) -> Lookup | None:
    """Return the kernel in `entry`, as the memory tier stores it, or None if `entry` is damaged."""
    dependencies = () if dependency_set is None else dependency_set.dependencies(request)
    try:
        kernel = CompiledKernel.from_entry(entry, key, dependencies, request.search)
    except CorruptEntryError as error:
        damaged.append((key, error))
        return None
    return Lookup(kernel, MEMORY, entry.cost, dependency_set, location=request.location)


def _manifest_of(entry: Entry, key: str, damaged: Damaged) -> Manifest | None:
    try:
        return manifest_type().from_entry(entry)
    except CorruptEntryError as error:
        damaged.append((key, error))
        return None


def manifest_type() -> type[Manifest]:
    """Import and return `Manifest`; a program whose requests have no headers never imports it."""
    with importing:
        from kcache.nvrtc.manifest import Manifest  # noqa: PLC0415  3 ms

    return Manifest


def _log_hit(request: Request, kernel: CompiledKernel, tier: str) -> None:
    where = "" if tier in (MEMORY, DISK) else f" from a {tier}"
    log.debug("hit%s: %s", where, title_of(request.source_name, kernel.functions()))
