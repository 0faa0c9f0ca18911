"""Find: finds the kernel of a request in the cache. Everything that a hit needs is here.

There is a class for each of three jobs. `Finder` reads kernels, `HeaderChecks` decides which header
set of a request holds, and `RequestCounts` counts requests. What a miss needs is in `resolver`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from kcache.engine.stats import NOTES
from kcache.errors import CorruptEntryError
from kcache.kernels.compiled_kernel import CompiledKernel
from kcache.util import log

if TYPE_CHECKING:
    from kcache.config import Config
    from kcache.engine.engine import CacheEngine
    from kcache.engine.stats import Counters
    from kcache.entry import Entry
    from kcache.nvrtc.files import FileDigests
    from kcache.nvrtc.manifest import Manifest, StoredHeaderSet
    from kcache.nvrtc.request import Request

__all__ = ["Checked", "Finder", "HeaderChecks", "RequestCounts", "build_finder", "log_hit"]

#: How many times its encoded size a decoded manifest takes in memory, as measured with tracemalloc.
#: The memory tier charges this much.
VIEW_FACTOR = 4
#: How many requests with checked headers are remembered, for `header_check="once"`.
_MAX_CHECKED = 4096
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

    def miss(self, amount: int = 1) -> None:
        """Count a request that the cache could not answer."""
        if self._misses:
            self._counters.add("misses", amount)

    def adopted(self, kernel: CompiledKernel) -> None:
        """Count a request that gets the kernel that another thread has just compiled."""
        self._counters.hit(self.saved(kernel.key, kernel.compile_seconds), 0.0, True)

    def joined(self, kernel: CompiledKernel | None, count: int, *, waited: bool) -> None:
        """Count requests that share one answer; one of them was counted already.

        `kernel` is None after an error; `waited` tells whether a compile ran meanwhile.
        """
        if waited and kernel is not None:
            self._counters.add("coalesced", count)
        for _ in range(count - 1):
            if kernel is not None and kernel.cached:
                self.adopted(kernel)
            else:
                self.miss()


class Checked(NamedTuple):
    """The result of a header check: where the kernel is, and the headers it was made from."""

    key: str
    dependencies: tuple[str, ...]


def _asked(request: Request) -> tuple[str, str, str]:
    """Return what a check is valid for: a header set may require a certain source name."""
    return request.key, request.location, request.source_name


class HeaderChecks:
    """Reads the manifests of requests, and decides which header set holds now.

    Threads: safe to share.

    Args:
        engine: where the manifests live.
        once: check the headers of a request once per process, not on every request.

    Attributes:
        once: as given.
    """

    def __init__(self, engine: CacheEngine, *, once: bool) -> None:
        self._engine = engine
        self.once = once
        self._checked: dict[tuple[str, str, str], Checked] = {}
        self._digests: FileDigests | None = None

    @property
    def digests(self) -> FileDigests:
        """The process's memory of file contents."""
        if self._digests is None:
            from kcache.nvrtc.files import FileDigests  # a request without headers does not need it

            self._digests = FileDigests()
        return self._digests

    def known(self, request: Request) -> Checked | None:
        """Return the result of an earlier check that is still sufficient, or None."""
        return self._checked.get(_asked(request)) if self.once else None

    def note(self, request: Request, checked: Checked) -> None:
        """Remember the result of a check, if one check per process is enough."""
        if self.once:
            if len(self._checked) >= _MAX_CHECKED:
                self._checked.clear()
            self._checked[_asked(request)] = checked

    def forget(self) -> None:
        """Forget which headers were checked."""
        self._checked.clear()

    def matching(
        self, request: Request, digests: FileDigests, *, again: bool
    ) -> tuple[Manifest, StoredHeaderSet] | None:
        """Return the manifest of a request and the header set in it that holds now, or None."""
        manifest, from_memory = self.manifest(request, again=again)
        if manifest is None:
            return None
        header_set = manifest.matching(request.search, digests, request.location)
        if header_set is None and from_memory:
            # Another process may have compiled the request with the present headers.
            self._engine.memory.delete(request.key)
            manifest, _ = self.manifest(request, again=again)
            if manifest is not None:
                header_set = manifest.matching(request.search, digests, request.location)
        if header_set is None or manifest is None:
            if not again:
                self._engine.counters.add("stale")
            return None
        return manifest, header_set

    def manifest(self, request: Request, *, again: bool) -> tuple[Manifest | None, bool]:
        """Return (the request's manifest or None, whether it came from memory)."""
        entry, from_memory = self._engine.fetch(request.key, again=again)
        if entry is None:
            return None, from_memory
        manifest = getattr(entry, "view", None)
        if manifest is None:
            manifest = self._decoded(request.key, entry, again=again)
        return manifest, from_memory

    def _decoded(self, key: str, entry: Entry, *, again: bool) -> Manifest | None:
        from kcache.nvrtc.manifest import Manifest

        try:
            manifest = Manifest.from_entry(entry)
        except CorruptEntryError as error:
            if not again:
                self._engine.refuse(key, error)
            return None
        entry.view = manifest
        if self._engine.memory.max_size:
            self._engine.memory.put(key, entry, VIEW_FACTOR * entry.size)
        return manifest

    def put(self, request: Request, manifest: Manifest) -> bool:
        """Store the manifest of a request; tell whether it is stored now."""
        entry = manifest.to_entry()
        entry.view = manifest
        return self._engine.put(request.key, entry)


class Finder:
    """Finds the kernels of requests in an engine, and counts those found as hits.

    Threads: safe to share.

    Args:
        engine: where kernels and manifests live.
        check_once: check the headers of a request once per process, not on every request.
        reads: whether `get` looks into the cache.
        writes: whether misses are counted.

    Attributes:
        headers: which header set of a request holds.
        counts: how many requests were answered, and how.
    """

    def __init__(self, engine: CacheEngine, *, check_once: bool, reads: bool, writes: bool) -> None:
        self.engine = engine
        self.reads = reads
        self.headers = HeaderChecks(engine, once=check_once)
        self.counts = RequestCounts(engine.counters, misses=writes)

    def get(self, request: Request, started: float) -> CompiledKernel | None:
        """Return the result of `find` if the cache is to be read, otherwise None."""
        if not self.reads:
            return None
        if request.self_contained:  # like `find`, without the call
            return self._load(request.key, (), started, again=False) or self._load_named(
                request, started, again=False
            )
        return self.find(request, started)

    def find(
        self, request: Request, started: float, *, again: bool = False
    ) -> CompiledKernel | None:
        """Return the cached kernel, counted as a hit, or None, not counted.

        `started` is the `time.perf_counter` value at which the request came. With `again`, stale
        and damaged entries are not counted, because they were a moment ago.
        """
        if request.self_contained:
            return self._load(request.key, (), started, again=again) or self._load_named(
                request, started, again=again
            )
        headers = self.headers
        if headers.once:
            checked = headers.known(request)
            if checked is not None:
                return self._load(checked.key, checked.dependencies, started, again=again)
        return self._find_checked(headers, request, started, again=again)

    def checked(self, request: Request) -> str:
        """Return the key of the kernel if its headers need no second check; otherwise empty."""
        known = self.headers.known(request)
        return "" if known is None or request.self_contained else known.key

    def close(self) -> None:
        """Close what is open beside the engine; nothing here. Idempotent."""

    def _find_checked(
        self, headers: HeaderChecks, request: Request, started: float, *, again: bool
    ) -> CompiledKernel | None:
        """Return the kernel of the header set that holds now, or None."""
        digests = headers.digests
        reads = digests.reads
        found = headers.matching(request, digests, again=again)
        if found is None:
            return None
        manifest, header_set = found
        dependencies = header_set.dependencies(request.search, request.location)
        key = header_set.result_key(request.key)
        kernel = self._load(key, dependencies, started, again=again)
        if kernel is not None:
            if headers.once:
                headers.note(request, Checked(key, dependencies))
            if digests.reads != reads and header_set.remember(
                request.search, digests, request.location
            ):
                headers.put(request, manifest)
        return kernel

    def _load_named(
        self, request: Request, started: float, *, again: bool
    ) -> CompiledKernel | None:
        """Return the kernel whose output shows this name of the source, or None."""
        key = request.named_key
        return self._load(key, (), started, again=again) if key else None

    def _load(
        self, key: str, dependencies: tuple[str, ...], started: float, *, again: bool
    ) -> CompiledKernel | None:
        """Return the kernel under `key`, counted as a hit, or None."""
        engine = self.engine
        entry, from_memory = engine.fetch(key, again=again)
        if entry is None:
            return None
        kernel = getattr(entry, "view", None)
        saved = 0.0
        if kernel is None or kernel.dependencies is not dependencies:
            try:
                kernel = CompiledKernel.from_entry(entry, key, dependencies)
            except CorruptEntryError as error:
                if not again:
                    engine.refuse(key, error)
                return None
            entry.view = kernel
            saved = self.counts.saved(key, entry.cost)
        if log.debugging():
            log_hit(entry)
        counters = engine.counters
        counters.noted.append((saved, time.perf_counter() - started, from_memory))
        if len(counters.noted) >= NOTES:  # like `Counters.hit`, without the call
            counters.values()
        return kernel


def log_hit(entry: Entry, source: str = "") -> None:
    """Log that the kernel in an entry answers a request; `source` is a place beyond the cache."""
    from kcache.nvrtc.inventory import title_of
    from kcache.nvrtc.metadata import text_of, texts_of

    about = entry.metadata
    names = texts_of(about.get("functions"))
    where = f" from a {source}" if source else ""
    log.debug("hit%s: %s", where, title_of(text_of(about.get("source_name")), names))


def build_finder(engine: CacheEngine, config: Config) -> Finder:
    """Return the finder for the settings, without layers; see `tiers.with_layers`."""
    once, disabled = config.header_check.value == "once", config.disable.value
    reads = not (disabled or config.recache.value)
    return Finder(engine, check_once=once, reads=reads, writes=not disabled)
