"""Find: finds the kernel of a request in the cache. Everything that a hit needs is here.

There is a class for each of three jobs. `Finder` reads kernels, `HeaderChecks` decides which header
set of a request holds, and `RequestCounts` counts requests. What a miss needs is in `resolver`.
"""

from __future__ import annotations

import sys
import time
from functools import cached_property
from typing import TYPE_CHECKING

from kcache.engine.stats import NOTES
from kcache.errors import CorruptEntryError
from kcache.kernels.compiled_kernel import CompiledKernel
from kcache.util import log

if TYPE_CHECKING:
    from kcache.config import Config
    from kcache.engine.engine import CacheEngine, Put
    from kcache.engine.stats import Counters
    from kcache.entry import Entry
    from kcache.kernels.sources import SourceKernels
    from kcache.nvrtc.files import FileDigests
    from kcache.nvrtc.manifest import Manifest, StoredHeaderSet
    from kcache.nvrtc.request import Request

#: How many times its encoded size a decoded manifest takes in memory, as measured with tracemalloc.
#: The memory tier charges this much.
VIEW_FACTOR = 4
#: How many kernels are remembered as known to this process.
_MAX_HAD = 65_536


class RequestCounts:
    """Counts requests. The engine counts gets, and one request may need several.

    Threads: safe to share.

    Args:
        counters: where the counts go.
        misses: whether misses are counted.
    """

    def __init__(self, counters: Counters, *, misses: bool) -> None:
        self._counters = counters
        self._misses = misses
        #: Kernels that this process has already got, either compiled or from the cache.
        self._had: set[str] = set()

    def saved(self, key: str, cost: float) -> float:
        """Return the compile time that a kernel saves: all of it, once per process that gets it.

        Without a cache, the process would have compiled it once.
        """
        if key in self._had:
            return 0.0
        if len(self._had) >= _MAX_HAD:
            self._had.clear()
        self._had.add(key)
        return cost

    def miss(self) -> None:
        """Count a request that the cache could not answer."""
        if self._misses:
            self._counters.add("misses")

    def adopted(self, kernel: CompiledKernel) -> None:
        """Count a request that gets the kernel that another one has just got."""
        self._counters.hit(self.saved(kernel.key, kernel.compile_seconds), 0.0, True)


class HeaderChecks:
    """Reads the manifests of requests, and decides which header set holds now.

    Threads: safe to share.

    Args:
        engine: where the manifests live.
        once: check the headers of a request once, as long as its manifest is in memory.
    """

    def __init__(self, engine: CacheEngine, *, once: bool) -> None:
        self._engine = engine
        self._once = once

    @cached_property
    def digests(self) -> FileDigests:
        """The process's memory of file contents."""
        from kcache.nvrtc.files import FileDigests  # a request without headers does not need it

        return FileDigests()

    def holding(
        self, request: Request, *, again: bool
    ) -> tuple[Manifest | None, StoredHeaderSet | None]:
        """Return the manifest of a request, and the header set in it that holds now, if any.

        Without such a set, the manifest was read just now.
        """
        manifest, from_memory = self._read(request.key, again=again)
        digests, location = self.digests, request.location
        while manifest is not None:
            header_set = manifest.checked.get(location)
            if header_set is None or not (self._once or header_set.holds(request, digests)):
                header_set = manifest.matching(request, digests)
            if header_set is not None:
                manifest.checked[location] = header_set
                return manifest, header_set
            if not from_memory:
                # Another project may have compiled the same source with other headers.
                if not again and manifest.was_checked_at(location):
                    self._engine.counters.add("stale")
                break
            # Another process may have compiled the request with the present headers.
            manifest = self.manifest(request)
            from_memory = False
        return manifest, None

    def checked(self, request: Request) -> str:
        """Return the key of the kernel if its headers need no second check; otherwise empty."""
        manifest = getattr(self._engine.memory.peek(request.key), "view", None)
        if not self._once or request.self_contained or manifest is None:
            return ""
        header_set = manifest.checked.get(request.location)
        return "" if header_set is None else header_set.result_key(request.key)

    def manifest(self, request: Request) -> Manifest | None:
        """Return the manifest as it is stored now, also by other processes, or None."""
        self._engine.memory.delete(request.key)
        return self._read(request.key, again=True)[0]

    def _read(self, key: str, *, again: bool) -> tuple[Manifest | None, bool]:
        """Return (a manifest or None, whether it came from memory)."""
        entry, from_memory = self._engine.fetch(key, again=again)
        manifest: Manifest | None = getattr(entry, "view", None)
        if entry is not None and manifest is None:
            from kcache.nvrtc import manifest as manifests

            try:
                manifest = entry.view = manifests.Manifest.from_entry(entry)
            except CorruptEntryError as error:
                if not again:
                    self._engine.refuse(key, error)
                return None, from_memory
            self._engine.memory.put(key, entry, VIEW_FACTOR * entry.size)
        return manifest, from_memory

    def put(self, request: Request, manifest: Manifest) -> Put:
        """Store the manifest of a request; return what happened."""
        entry = manifest.to_entry()
        entry.view = manifest
        return self._engine.put(request.key, entry)


class Finder:
    """Finds the kernels of requests in a cache, then in the layers below, and counts the hits.

    Threads: safe to share. Fork: a child may go on using it.

    Args:
        engine: where kernels and manifests live.
        config: the settings.

    Attributes:
        reads: whether the cache is to be read.
        headers: which header set of a request holds.
        counts: how many requests were answered, and how.
        below: the layers, asked for what the cache does not have. A miss in all of them is not
            remembered, because a layer may be filled while programs use it. None if there are none.
    """

    def __init__(self, engine: CacheEngine, config: Config) -> None:
        disabled = config.disable.value
        self.engine = engine
        self.reads = not (disabled or config.recache.value)
        self.headers = HeaderChecks(engine, once=config.header_check.value == "once")
        self.counts = RequestCounts(engine.counters, misses=not disabled)
        self.below: SourceKernels | None = None

    def get(self, request: Request, started: float) -> CompiledKernel | None:
        """Return the kernel if the cache is to be read, as `look` does; otherwise None."""
        return self.look(request, started)[0] if self.reads else None

    def look(
        self, request: Request, started: float, *, again: bool = False
    ) -> tuple[CompiledKernel | None, Manifest | None]:
        """Return the kernel, counted as a hit, or None, not counted; and the request's manifest.

        `started` is the `time.perf_counter` value at which the request came. With `again`,
        stale and damaged entries are not counted, because they were a moment ago.
        """
        manifest = None
        if request.self_contained:
            kernel = self._load(request, request.key, (), started, again)
        else:
            kernel, manifest = self._look_by_headers(request, started, again=again)
        if kernel is None and self.below is not None:
            found = self.below.find(request, started, manifest, again=again)
            kernel = None if found is None else found[0]
        return kernel, manifest

    def close(self) -> None:
        """Close the layers. Idempotent."""
        if self.below is not None:
            self.below.close()

    def _look_by_headers(
        self, request: Request, started: float, *, again: bool
    ) -> tuple[CompiledKernel | None, Manifest | None]:
        """Return the kernel of the header set that holds now, or None; and the manifest."""
        headers = self.headers
        reads = headers.digests.reads
        manifest, header_set = headers.holding(request, again=again)
        if manifest is None or header_set is None:
            return None, manifest
        key, dependencies = header_set.result_key(request.key), header_set.dependencies(request)
        kernel = self._load(request, key, dependencies, started, again)
        if kernel is None:  # it was evicted
            return None, headers.manifest(request) if again else manifest
        if headers.digests.reads != reads and header_set.remember(request):
            headers.put(request, manifest)
        return kernel, manifest

    def _load(
        self,
        request: Request,
        key: str,
        dependencies: tuple[str, ...],
        started: float,
        again: bool,
    ) -> CompiledKernel | None:
        """Return the kernel under `key`, counted as a hit, or None."""
        engine = self.engine
        entry, from_memory = engine.fetch(key, again=again)
        if entry is None:
            return None
        kernel: CompiledKernel | None = entry.view
        saved = 0.0
        if kernel is None or kernel.dependencies is not dependencies:
            kernel = self.kernel_in(request, entry, key, dependencies, again=again)
            if kernel is None:
                return None
            saved = entry.cost
        if saved:
            saved = self.counts.saved(key, saved)
        if "logging" in sys.modules and log.debugging():
            log_hit(entry)
        counters = engine.counters
        counters.noted.append((saved, time.perf_counter() - started, from_memory))
        if len(counters.noted) >= NOTES:  # as `Counters.hit`, without a call
            counters.values()
        return kernel

    def kernel_in(
        self,
        request: Request,
        entry: Entry,
        key: str,
        dependencies: tuple[str, ...],
        *,
        again: bool,
    ) -> CompiledKernel | None:
        """Return the kernel in an entry, which keeps it; None if the entry holds none."""
        try:
            kernel = CompiledKernel.from_entry(entry, key, dependencies, request.search)
        except CorruptEntryError as error:
            if not again:
                self.engine.refuse(key, error)
            return None
        entry.view = kernel
        return kernel


def log_hit(entry: Entry, source: str = "") -> None:
    """Log that the kernel in an entry answers a request; `source` is a place beyond the cache."""
    from kcache.nvrtc.metadata import text_of, texts_of, title_of

    about = entry.metadata
    names = texts_of(about.get("functions"))
    where = f" from a {source}" if source else ""
    log.debug("hit%s: %s", where, title_of(text_of(about.get("source_name")), names))
