"""Resolver: from a request to a kernel, found in the cache, or compiled and stored."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from kcache import log
from kcache.entry import Entry
from kcache.errors import ConfigError, CorruptEntryError
from kcache.kernel import CompiledKernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from kcache.engine import CacheEngine
    from kcache.entry import JSON
    from kcache.nvrtc.files import FileDigests
    from kcache.nvrtc.frontend import Frontend, Outcome
    from kcache.nvrtc.manifest import Manifest, Variant
    from kcache.nvrtc.request import Request

__all__ = ["Resolver"]

#: A manifest that was decoded takes this many times its size in memory (measured by
#: bench/memory_tier.py), which the memory tier charges for it.
_VIEW_FACTOR = 4
#: Requests whose headers were checked are remembered up to this many, for `header_check="once"`.
_MAX_CHECKED = 4096


class _Checked(NamedTuple):
    """The result of a header check: where the kernel is, and the headers it was made from."""

    key: str
    dependencies: tuple[str, ...]


class Resolver:
    """Answers requests from an engine, and fills it through a frontend.

    Threads: safe to share.

    Args:
        engine: where kernels and manifests live.
        frontend: makes the compiler's frontend when it is first needed.
        check_once: check the headers of a request once per process, not on every request.
    """

    def __init__(
        self, engine: CacheEngine, frontend: Callable[[FileDigests], Frontend], *, check_once: bool
    ) -> None:
        self._engine = engine
        self._make_frontend = frontend
        self._check_once = check_once
        self._checked: dict[tuple[str, str], _Checked] = {}
        self._digests: FileDigests | None = None
        self._frontend: Frontend | None = None

    def find(self, request: Request, started: float) -> CompiledKernel | None:
        """Return the cached kernel, counted as a hit, or None, not counted.

        `started` is the `time.perf_counter` value at which the request came.
        """
        if request.self_contained:
            return self._load(request.key, (), started)
        if self._check_once:
            checked = self._checked.get((request.key, request.location))
            if checked is not None:
                return self._load(checked.key, checked.dependencies, started)
        return self._find_checked(request, started)

    def compile(self, request: Request, *, store: bool) -> CompiledKernel:
        """Compile a request, and store the outcome if that is asked for and right.

        Raises:
            CompileError: the compiler refused it; CompilerNotFoundError: there is none.
        """
        outcome = self._front().compile(request, track=store)
        compiled = outcome.compiled
        counters = self._engine.counters
        with counters.lock:
            counters.compiles += 1
            counters.compile_seconds += compiled.seconds
            counters.uncacheable += store and outcome.uncacheable is not None
        if outcome.uncacheable is not None:
            if store:
                log.debug("%s is not cached: %s", request.source_name, outcome.uncacheable)
            return CompiledKernel.of(compiled, request.key, ())
        return self._store(request, outcome)

    def forget(self) -> None:
        """Forget which headers were checked."""
        self._checked.clear()

    # -- finding ---------------------------------------------------------------------------------

    def _load(
        self, key: str, dependencies: tuple[str, ...], started: float
    ) -> CompiledKernel | None:
        """Return the kernel under `key`, counted as a hit, or None."""
        engine = self._engine
        entry, from_memory = engine.fetch(key)
        if entry is None:
            return None
        kernel = getattr(entry, "view", None)
        if kernel is None or kernel.dependencies is not dependencies:
            try:
                kernel = CompiledKernel.from_entry(entry, key, dependencies)
            except CorruptEntryError as error:
                engine.refuse(key, error)
                return None
            entry.view = kernel
        engine.count_hit(entry, started, from_memory=from_memory)
        return kernel

    def _find_checked(self, request: Request, started: float) -> CompiledKernel | None:
        digests = self._known_digests()
        reads = digests.reads
        manifest, from_memory = self._fetch_manifest(request)
        if manifest is None:
            return None
        variant = manifest.matching(request.search, digests, request.location)
        if variant is None and from_memory:
            # Another process may have compiled what the headers say now.
            self._engine.memory.delete(request.key)
            manifest, _ = self._fetch_manifest(request)
            if manifest is not None:
                variant = manifest.matching(request.search, digests, request.location)
        if variant is None or manifest is None:
            self._engine.counters.add("stale")
            log.debug("headers of %s have changed since they were cached", request.source_name)
            return None
        dependencies = variant.dependencies(request.search, request.location)
        key = variant.result_key(request.key, request.search)
        kernel = self._load(key, dependencies, started)
        if kernel is not None:
            if self._check_once:
                self._note_checked(request, _Checked(key, dependencies))
            if digests.reads != reads and variant.remember(
                request.search, digests, request.location
            ):
                self._engine.put(request.key, _with_view(manifest))
        return kernel

    def _fetch_manifest(
        self, request: Request, *, again: bool = False
    ) -> tuple[Manifest | None, bool]:
        """Return (manifest or None, whether it came from memory)."""
        entry, from_memory = self._engine.fetch(request.key, again=again)
        return (None if entry is None else self._manifest(request.key, entry)), from_memory

    def _manifest(self, key: str, entry: Entry) -> Manifest | None:
        from kcache.nvrtc.manifest import Manifest

        manifest = getattr(entry, "view", None)
        if manifest is None:
            try:
                manifest = Manifest.from_entry(entry)
            except CorruptEntryError as error:
                self._engine.refuse(key, error)
                return None
            entry.view = manifest
            if self._engine.memory.max_size:
                self._engine.memory.put(key, entry, _VIEW_FACTOR * entry.size)
        return manifest

    def _note_checked(self, request: Request, checked: _Checked) -> None:
        if len(self._checked) >= _MAX_CHECKED:
            self._checked.clear()
        self._checked[request.key, request.location] = checked

    # -- storing ---------------------------------------------------------------------------------

    def _store(self, request: Request, outcome: Outcome) -> CompiledKernel:
        key = request.key
        dependencies: tuple[str, ...] = ()
        variant: Variant | None = None
        if outcome.headers is not None:
            from kcache.nvrtc.manifest import Variant

            variant = Variant.of(outcome.headers)
            key = variant.result_key(request.key, request.search)
            dependencies = variant.dependencies(request.search, request.location)
        kernel = CompiledKernel.of(outcome.compiled, key, dependencies)
        try:
            entry = kernel.to_entry(_about(request))
            # The kernel first: a manifest must not promise what is not there.
            if self._engine.put(key, entry) and variant is not None:
                self._store_manifest(request, variant)
        except (ConfigError, OSError) as error:
            self._engine.report("store", error)
        return kernel

    def _store_manifest(self, request: Request, variant: Variant) -> None:
        from kcache.nvrtc.manifest import Manifest

        digests = self._known_digests()
        if not variant.holds(request.search, digests, request.location):
            return  # changed again already; the next request finds out more
        variant.remember(request.search, digests, request.location)
        # From the backend, to take along what another process has added.
        self._engine.memory.delete(request.key)
        manifest, _ = self._fetch_manifest(request, again=True)
        merged = Manifest(list(manifest.variants) if manifest is not None else [])
        merged.add(variant)
        self._engine.put(request.key, _with_view(merged))
        if self._check_once:
            key = variant.result_key(request.key, request.search)
            paths = variant.dependencies(request.search, request.location)
            self._note_checked(request, _Checked(key, paths))

    # -- made when needed --------------------------------------------------------------------------

    def _known_digests(self) -> FileDigests:
        if self._digests is None:
            from kcache.nvrtc.files import FileDigests

            self._digests = FileDigests()
        return self._digests

    def _front(self) -> Frontend:
        if self._frontend is None:
            self._frontend = self._make_frontend(self._known_digests())
        return self._frontend


def _with_view(manifest: Manifest) -> Entry:
    entry = manifest.to_entry()
    entry.view = manifest
    return entry


def _about(request: Request) -> dict[str, JSON]:
    """Return what tools that list entries want to know of a kernel."""
    return {
        "source_name": request.source_name,
        "names": [*request.names],
        "arch": request.options.target,
        "flags": [*request.options.flags()],
        "compiler": request.compiler,
        "created": time.time(),
    }
