"""Lookup: looks for the kernel of a request, in one tier after the other.

A tier has entries under keys. `LocalTier` is the memory and the backend of the user's own cache.
`SharedTier` is a group of read-only directories and bundles, or of remotes, whose entries are
checked like all others. `find_in` walks all of them. What it finds is a value,
`Lookup`; `Tiers.hit` counts and logs it, once for each request. `resolver` handles a miss.
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
        dependency_set: leads to the kernel, and holds now; None for a source that reads no file.
        manifest: without a kernel, the manifest of the request that was read last from the first
            tier; None if none was read.
        damaged: entries that were found during the lookup and can't be used.
        changed: whether no dependency set of the own cache holds now, although one held before at
            this location.
        location: of the request; the kernel's log and dependencies have the paths of this location.
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

    Threads: safe to share. Fork: a child may use it.

    Args:
        engine: of the cache.
        once: whether the headers of a request are checked only once while its manifest is in
            memory.
        peek: whether to record no use of an entry and keep none in memory.
    """

    def __init__(self, engine: CacheEngine, *, once: bool = False, peek: bool = False) -> None:
        self.engine = engine
        self.once = once
        self._fetch = engine.peek if peek else engine.fetch
        self._peeks = peek
        #: How many files had been read when stamps were last stored.
        self._reads = 0
        self._digests: FileDigests | None = None

    @property
    def digests(self) -> FileDigests:
        """The process's memory of file contents."""
        if self._digests is None:  # Python 3.11's `cached_property` has a lock, held at a fork
            with importing:
                from kcache.nvrtc.files import FileDigests  # noqa: PLC0415  as `manifest_type`

                self._digests = self._digests or FileDigests()
        return self._digests

    def kernel(
        self, request: Request, key: str, dependency_set: DependencySet | None, damaged: Damaged
    ) -> Lookup | None:
        """Return the kernel under a key; None if there is none."""
        slot, tier = self._fetch(key, damaged)
        if slot is None:
            return None
        found: Lookup | None = slot.decoded
        if found is None or found.location != request.location:
            found = _decoded(request, slot.value, key, dependency_set, damaged)
            slot.decoded = found
        return found if tier is MEMORY or found is None else found._replace(tier=tier)

    def manifests(self, request: Request, damaged: Damaged) -> Iterator[tuple[Manifest, bool]]:
        """Yield the manifest in memory, then the one in the backend, and whether to keep each.

        Another process may have compiled the request with the present headers, so that only the
        backend has its dependency set.
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
        """Store what was verified for other processes, if files had to be read to verify it."""
        if keep and self.digests.reads != self._reads:
            self._reads = self.digests.reads
            if not self._peeks and holding.remember(request):
                self.put(request.key, manifest.to_entry(), decoded=manifest)

    def merge(
        self, request: Request, dependency_sets: Sequence[DependencySet], *, keep: bool = True
    ) -> Put:
        """Add dependency sets to the manifest of a request; the last of them holds now.

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
        """Store an entry; without `keep`, or if that fails, keep it in memory only."""
        done = Put.FAILED
        if not self._peeks:
            done = self.engine.put(key, entry, decoded=decoded) if keep else done
            if not done:
                self.engine.memory.put(key, entry, entry.size, decoded=decoded)
        return done

    def _manifest(
        self, key: str, damaged: Damaged, *, memory: bool = True
    ) -> tuple[Manifest | None, str]:
        """Return the manifest under a key, or None, and the tier; see `CacheEngine.fetch`."""
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

    Its members only return entries; here these are checked like all others, and headers are
    compared. A kernel that is found is kept in memory, and in the user's own cache if its member
    has the option `keep`.

    Threads: safe to share. Fork: as the members.

    Args:
        local: the user's own cache.
        members: return the entries; `close` closes them.
        name: `layer` or `remote`.
    """

    once = False

    def __init__(self, local: LocalTier, members: Tier, name: str) -> None:
        self._local = local
        self._members = members
        self._name = name

    @property
    def digests(self) -> FileDigests:
        """The process's memory of file contents."""
        return self._local.digests

    def kernel(
        self, request: Request, key: str, dependency_set: DependencySet | None, damaged: Damaged
    ) -> Lookup | None:
        """Return the kernel under a key and keep it; None if no member has a sound one.

        Raises:
            Exception: what the members raise; so do `manifests` and `entries`.
        """
        for entry, keep in self.entries(key, damaged):
            found = _decoded(request, entry, key, dependency_set, damaged)
            if found is not None:
                self._local.put(key, entry, keep=keep)
                return found._replace(tier=self._name)
        return None

    def manifests(self, request: Request, damaged: Damaged) -> Iterator[tuple[Manifest, bool]]:
        """Yield the manifests of a request, and whether to keep each.

        The stamps of files are left out, because they are those of other machines.
        """
        for entry, keep in self.entries(request.key, damaged):
            manifest = _manifest_of(entry, request.key, damaged)
            if manifest is not None:
                yield manifest.without_stamps(), keep

    def keep(
        self, request: Request, manifest: Manifest, holding: DependencySet, *, keep: bool
    ) -> None:
        """Merge a manifest that has led to a kernel into that of the user's own cache."""
        others = [each for each in manifest.dependency_sets if each is not holding]
        self._local.merge(request, (*reversed(others), holding), keep=keep)

    def entries(self, key: str, damaged: Damaged) -> Iterator[tuple[Entry, bool]]:
        """Yield the sound entries under a key, and whether to keep each."""
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
    """Return the kernel of a request from the first tier that has it; count nothing."""
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

    Threads: safe to share. Fork: a child may use it.

    Args:
        engine: of the user's own cache.
        config: the settings.
        peek: see `LocalTier`.

    Attributes:
        engine: as given.
        local: the user's own cache.
        reads: whether kernels are looked up; false if the setting `disable` or `recache` is on.
        all: the user's own cache, then directories and bundles if there are some. A miss in these
            is not remembered, because they may be filled while programs use them.
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
        """Return the kernel of a request, counted as a hit and logged; None if no tier has it.

        Args:
            request: the request.
            started: when it began, by `time.perf_counter`; None for now.
            found: the result of a lookup; None to look up the request here if `reads` is true.
            is_retry: whether an earlier lookup has counted the stale and damaged entries.
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
        """Count a hit for a kernel that another request has just obtained; return the kernel."""
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
    """Return the kernel in an entry, in the form that the memory tier keeps, or None."""
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
    """Return the class of manifests, which requests without headers do not need."""
    with importing:
        from kcache.nvrtc.manifest import Manifest  # noqa: PLC0415  3 ms

    return Manifest


def _log_hit(request: Request, kernel: CompiledKernel, tier: str) -> None:
    where = "" if tier in (MEMORY, DISK) else f" from a {tier}"
    log.debug("hit%s: %s", where, title_of(request.source_name, kernel.functions()))
