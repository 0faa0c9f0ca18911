"""Lookup: looks for the kernel of a request, in one tier after the other.

A tier has entries under keys. `LocalTier` is the memory and the backend of the user's own cache.
`SharedTier` is a group of read-only directories and bundles, or of remotes, whose entries are
checked like all others. The same function, `find_in`, walks all of them. What it finds is a value;
`RequestCounts.record` counts and logs it, once for each request. `resolver` handles a miss.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from kcache.engine.engine import Put
from kcache.entry import Entry, decode
from kcache.errors import CorruptEntryError
from kcache.kernels.compiled_kernel import CompiledKernel
from kcache.util import log

if TYPE_CHECKING:
    from kcache.config import Config
    from kcache.engine.engine import CacheEngine
    from kcache.nvrtc.files import FileDigests
    from kcache.nvrtc.manifest import DependencySet, Manifest
    from kcache.nvrtc.request import Request
    from kcache.readonly.directory_tier import Tier

#: How many times its encoded size a decoded manifest takes in memory, as measured with tracemalloc.
#: The memory tier charges this much.
VIEW_FACTOR = 4
#: How many kernels are remembered as known to this process.
_MAX_HAD = 65_536
#: The tiers of the user's own cache.
MEMORY, DISK = "memory", "disk"
_OWN = (MEMORY, DISK)

#: Entries that can't be used: their keys, and what is wrong with them.
Damaged = list[tuple[str, CorruptEntryError]]


class Lookup(NamedTuple):
    """What the tiers have for one request.

    Attributes:
        kernel: the kernel, or None.
        tier: that has it: `memory`, `disk`, `layer` or `remote`.
        seconds: what its compile took.
        dependency_set: that leads to it, and holds now; None for a source that reads no file.
        manifest: of the request in the user's own cache, as far as it was read.
        damaged: entries that were found on the way, and can't be used.
        changed: whether no dependency set of the own cache holds although one did at this location.
        location: of the request; the kernel's log and dependencies have the paths of this place.
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
    """The user's own cache: what this process has in memory, then what the backend has.

    Threads: safe to share. Fork: a child may use it.

    Args:
        engine: of the cache.
        once: check the headers of a request once, as long as its manifest is in memory.
        peek: record no use of an entry, and keep none in memory.
    """

    def __init__(self, engine: CacheEngine, *, once: bool = False, peek: bool = False) -> None:
        self.engine = engine
        self._once = once
        self._fetch = engine.peek if peek else engine.fetch
        self._peeks = peek
        #: How many files had been read when stamps were last stored.
        self._reads = 0

    @cached_property
    def digests(self) -> FileDigests:
        """The process's memory of file contents."""
        from kcache.nvrtc.files import FileDigests  # a request without headers does not need it

        return FileDigests()

    def kernels(
        self, request: Request, key: str, dependency_set: DependencySet | None, damaged: Damaged
    ) -> Lookup | None:
        """Return the kernel under a key; None if there is none."""
        entry, from_memory = self._fetch(key, damaged)
        if entry is None:
            return None
        dependencies = () if dependency_set is None else dependency_set.dependencies(request)
        found: Lookup | None = entry.view
        if found is None or found.location != request.location:
            kernel = kernel_in(request, entry, key, dependencies, damaged)
            if kernel is None:
                return None
            found = Lookup(kernel, MEMORY, entry.cost, dependency_set, location=request.location)
            entry.view = found
        return found if from_memory else found._replace(tier=DISK)

    def manifests(self, request: Request, damaged: Damaged) -> Iterator[tuple[Manifest, bool]]:
        """Yield the manifest in memory, then that in the backend if another one is needed.

        Another process may have compiled the request with the present headers.
        """
        manifest, from_memory = self._manifest(request.key, damaged)
        if manifest is not None:
            yield manifest, True
        if from_memory:
            manifest = self._stored(request.key, damaged)
            if manifest is not None:
                yield manifest, True

    def holding(self, request: Request, manifest: Manifest) -> DependencySet | None:
        """Return the dependency set of a manifest that holds now, or None."""
        dependency_set = manifest.checked.get(request.location)
        once = self._once and request.start is None  # edited files of a build are always seen
        if dependency_set is None or not (once or dependency_set.holds(request, self.digests)):
            dependency_set = manifest.matching(request, self.digests)
        if dependency_set is not None:
            manifest.checked[request.location] = dependency_set
        return dependency_set

    def checked(self, request: Request) -> str:
        """Return the key of the kernel if its headers need no second check; otherwise empty."""
        manifest = getattr(self.engine.memory.peek(request.key), "view", None)
        if not self._once or request.self_contained or manifest is None:
            return ""
        dependency_set = manifest.checked.get(request.location)
        return "" if dependency_set is None else dependency_set.result_key(request.key)

    def found(
        self, request: Request, manifest: Manifest, holding: DependencySet, *, keep: bool
    ) -> None:
        """Store what was verified, if a file had to be read for that, for other processes."""
        if keep and self.digests.reads != self._reads:
            self._reads = self.digests.reads
            if not self._peeks and holding.remember(request):
                self._put(request.key, manifest, keep=True)

    def merge(
        self, request: Request, dependency_sets: Sequence[DependencySet], *, keep: bool = True
    ) -> Put:
        """Store dependency sets, of which the last one holds now, in the manifest of a request.

        Without `keep`, they are in memory only.
        """
        from kcache.nvrtc.manifest import Manifest  # a hit does not need it

        read = self._stored if keep else self._manifest_only
        manifest = Manifest([*getattr(read(request.key, []), "dependency_sets", ())])
        for each in dependency_sets:
            manifest.add(each)
        manifest.checked[request.location] = dependency_sets[-1]
        dependency_sets[-1].remember(request)
        return self._put(request.key, manifest, keep=keep)

    def _put(self, key: str, manifest: Manifest, *, keep: bool) -> Put:
        entry = manifest.to_entry()
        entry.view = manifest
        return self.keep(key, entry, VIEW_FACTOR * entry.size, keep=keep)

    def keep(self, key: str, entry: Entry, size: int, *, keep: bool) -> Put:
        """Store an entry, or keep it in memory only, where it is charged `size` bytes."""
        if self._peeks:
            return Put.FAILED
        if keep:
            done = self.engine.put(key, entry)
            if done:
                return done
        self.engine.memory.put(key, entry, size)
        return Put.FAILED

    def _stored(self, key: str, damaged: Damaged) -> Manifest | None:
        """Return a manifest as the backend has it now, or None."""
        if not self._peeks:
            self.engine.memory.delete(key)
            return self._manifest(key, damaged)[0]
        entry = self.engine.peek(key, damaged, memory=False)[0]
        return None if entry is None else _manifest_in(entry, key, damaged)

    def _manifest_only(self, key: str, damaged: Damaged) -> Manifest | None:
        return self._manifest(key, damaged)[0]

    def _manifest(self, key: str, damaged: Damaged) -> tuple[Manifest | None, bool]:
        """Return a manifest or None, and whether it came from memory."""
        entry, from_memory = self._fetch(key, damaged)
        manifest: Manifest | None = getattr(entry, "view", None)
        if entry is not None and manifest is None:
            manifest = _manifest_in(entry, key, damaged)
            if manifest is not None and not self._peeks:
                entry.view = manifest
                self.engine.memory.put(key, entry, VIEW_FACTOR * entry.size)
        return manifest, from_memory


class SharedTier:
    """Read-only directories and bundles, or remotes: they can only offer entries.

    Each entry is checked like every entry, and headers are compared here. A kernel that is found
    stays in memory, and in the user's own cache if its member has the option `keep`.

    Threads: safe to share. Fork: as the members.

    Args:
        local: the user's own cache.
        members: are asked.
        name: `layer` or `remote`.
    """

    def __init__(self, local: LocalTier, members: Tier, name: str) -> None:
        self._local = local
        self._members = members
        self._name = name

    def kernels(
        self, request: Request, key: str, dependency_set: DependencySet | None, damaged: Damaged
    ) -> Lookup | None:
        """Return the kernel under a key, which is kept; None if there is none.

        Raises:
            Exception: whatever the members raise; the other methods, too.
        """
        dependencies = () if dependency_set is None else dependency_set.dependencies(request)
        for entry, keep in self.entries(key, damaged):
            kernel = kernel_in(request, entry, key, dependencies, damaged)
            if kernel is not None:
                self._local.keep(key, entry, entry.size, keep=keep)
                return Lookup(kernel, self._name, entry.cost, dependency_set)
        return None

    def manifests(self, request: Request, damaged: Damaged) -> Iterator[tuple[Manifest, bool]]:
        """Yield the manifests of a request, and whether each is to be kept.

        What other machines have noted about their files is left out.
        """
        from kcache.nvrtc.manifest import DependencySet, Manifest

        for entry, keep in self.entries(request.key, damaged):
            manifest = _manifest_in(entry, request.key, damaged)
            if manifest is not None:
                yield Manifest([DependencySet(each.raw) for each in manifest.dependency_sets]), keep

    def holding(self, request: Request, manifest: Manifest) -> DependencySet | None:
        """Return the dependency set of a manifest that holds now, or None."""
        return manifest.matching(request, self._local.digests)

    def found(
        self, request: Request, manifest: Manifest, holding: DependencySet, *, keep: bool
    ) -> None:
        """Merge a manifest that has led to a kernel into that of the user's own cache."""
        others = [each for each in manifest.dependency_sets if each is not holding]
        self._local.merge(request, (*reversed(others), holding), keep=keep)

    def entries(self, key: str, damaged: Damaged) -> Iterator[tuple[Entry, bool]]:
        """Yield the sound entries under a key, and whether each is to be kept."""
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


def find_in(tier: LocalTier | SharedTier, request: Request) -> Lookup:
    """Return what one tier has for a request."""
    damaged: Damaged = []
    if request.self_contained:
        found = tier.kernels(request, request.key, None, damaged)
        if found is not None and not damaged:
            return found
        return (found or _MISS)._replace(damaged=damaged)
    manifest, changed = None, False
    for manifest, keep in tier.manifests(request, damaged):
        dependency_set = tier.holding(request, manifest)
        changed = dependency_set is None and manifest.was_checked_at(request.location)
        if dependency_set is not None:
            key = dependency_set.result_key(request.key)
            found = tier.kernels(request, key, dependency_set, damaged)
            if found is not None:
                tier.found(request, manifest, dependency_set, keep=keep)
                return found._replace(manifest=manifest, damaged=damaged)
    return Lookup(None, manifest=manifest, damaged=damaged, changed=changed)


_MISS = Lookup(None)


class Tiers:
    """The tiers of a cache that are asked before a compile: its own, then read-only ones.

    Threads: safe to share. Fork: a child may use it.

    Args:
        engine: of the user's own cache.
        config: the settings.

    Attributes:
        local: the user's own cache.
        reads: whether the cache is to be read.
        read_only: directories and bundles. A miss in them is not remembered, because they may be
            filled while programs use them. None if there are none.
    """

    def __init__(self, engine: CacheEngine, config: Config) -> None:
        self.local = LocalTier(engine, once=config.header_check.value == "once")
        self.reads = not (config.disable.value or config.recache.value)
        self.read_only: SharedTier | None = None

    def lookup(self, request: Request) -> Lookup:
        """Return what the tiers have for a request; counts nothing."""
        found = find_in(self.local, request)
        if found.kernel is None and self.read_only is not None:
            shared = find_in(self.read_only, request)
            damaged = [*found.damaged, *shared.damaged]
            if shared.kernel is not None:
                return shared._replace(damaged=damaged)
            return found._replace(damaged=damaged)
        return found

    def close(self) -> None:
        """Close the read-only tiers. Idempotent."""
        if self.read_only is not None:
            self.read_only.close()


class RequestCounts:
    """Counts and logs requests. The engine counts gets, and one request may need several.

    Threads: safe to share.

    Args:
        engine: whose counters are used.
        misses: whether misses are counted.
    """

    def __init__(self, engine: CacheEngine, *, misses: bool) -> None:
        self._engine = engine
        self._misses = misses
        #: Kernels that this process has already got, either compiled or from the cache.
        self._had: set[str] = set()

    def record(
        self, request: Request, found: Lookup, started: float, *, is_retry: bool = False
    ) -> CompiledKernel | None:
        """Count and log a lookup that began at `started` (`time.perf_counter`); return the kernel.

        A retry does not count stale and damaged entries, because the first lookup did so.
        """
        if found.damaged or found.changed:
            self._count_problems(found, is_retry=is_retry)
        kernel, tier = found.kernel, found.tier
        if kernel is None:
            return None
        saved = 0.0 if kernel.key in self._had else self.saved(kernel.key, found.seconds)
        self._engine.counters.hit(saved, time.perf_counter() - started, tier is MEMORY)
        if tier not in _OWN:
            self._engine.counters.add(f"{tier}_hits")
        if "logging" in sys.modules and log.debugging():
            _log_hit(request, kernel, tier)
        return kernel

    def _count_problems(self, found: Lookup, *, is_retry: bool) -> None:
        if is_retry:
            return
        for key, error in found.damaged:
            self._engine.refuse(key, error)
        if found.kernel is None and found.changed:
            self._engine.counters.add("stale")

    def saved(self, key: str, seconds: float) -> float:
        """Return the compile time that a kernel saves: all of it, once per process that gets it.

        Without a cache, the process would have compiled it once.
        """
        if key in self._had:
            return 0.0
        if len(self._had) >= _MAX_HAD:
            self._had.clear()
        self._had.add(key)
        return seconds

    def miss(self) -> None:
        """Count a request that the cache could not answer."""
        if self._misses:
            self._engine.counters.add("misses")

    def adopted(self, kernel: CompiledKernel) -> CompiledKernel:
        """Count a request that gets the kernel that another one has just got; return it."""
        saved = self.saved(kernel.key, kernel.compile_seconds)
        self._engine.counters.hit(saved, 0.0, True)
        return kernel._replace(cached=True)


def kernel_in(
    request: Request, entry: Entry, key: str, dependencies: tuple[str, ...], damaged: Damaged
) -> CompiledKernel | None:
    """Return the kernel in an entry, or None."""
    try:
        return CompiledKernel.from_entry(entry, key, dependencies, request.search)
    except CorruptEntryError as error:
        damaged.append((key, error))
        return None


def _manifest_in(entry: Entry, key: str, damaged: Damaged) -> Manifest | None:
    from kcache.nvrtc.manifest import Manifest  # a request without headers does not need it

    try:
        return Manifest.from_entry(entry)
    except CorruptEntryError as error:
        damaged.append((key, error))
        return None


def _log_hit(request: Request, kernel: CompiledKernel, tier: str) -> None:
    from kcache.nvrtc.metadata import title_of

    where = "" if tier in _OWN else f" from a {tier}"
    log.debug("hit%s: %s", where, title_of(request.source_name, kernel.functions()))
