"""Resolver: handles a request that missed, from beginning to end.

1. `Resolver.get`: one thread of one process goes on, and the others wait for it
   (`engine.single_flight`). It looks again (`find`), and asks remotes (`remotes`).
2. Otherwise the request is compiled (`nvrtc.frontend`). The kernel is stored, and then its
   manifest, so that no manifest names a kernel that was never stored, whenever the process is
   killed. If two processes store header sets of one request at the same time, one of the two may be
   lost, and is compiled again.
3. The threads that waited find the kernel in the cache, or adopt the answer.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from kcache.engine.engine import Put
from kcache.errors import CompileError, ConfigError, MissError
from kcache.gpu_code import templates_in
from kcache.kernels.compiled_kernel import CompiledKernel
from kcache.util import log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kcache.config import Config
    from kcache.engine.opening import OpenedBackend
    from kcache.entry import Entry
    from kcache.kernels.find import Finder
    from kcache.kernels.remotes import RemoteKernels
    from kcache.kernels.sources import Found
    from kcache.nvrtc.compiler import Compiled
    from kcache.nvrtc.frontend import Frontend
    from kcache.nvrtc.manifest import Manifest, StoredHeaderSet
    from kcache.nvrtc.request import Request
    from kcache.remote.daemon_client import Lease


class Resolver:
    """Answers requests that missed: compiles each once, and stores it.

    Threads: safe to share. Processes: by the lock file, one of them compiles a kernel. Crash and
    fork: as `Flight`.

    Args:
        finder: of the cache that missed.
        opened: its directory, with its settings.
        for_compiler: returns the request for the compiler that has run, by its identity.

    Attributes:
        finder: as given.
        remotes: asked before a compile, and told of it; None if there are none.
    """

    def __init__(
        self, finder: Finder, opened: OpenedBackend, for_compiler: Callable[[Request, str], Request]
    ) -> None:
        self.finder = finder
        self.remotes: RemoteKernels | None = None
        self._config = config = opened.config
        if config.remote.value:
            from kcache.kernels.tiers import build_remotes  # few programs use remotes

            self.remotes = build_remotes(finder, config)
        self._directory = None if finder.engine.read_only else opened.directory
        self._for_compiler = for_compiler
        self._writes = not config.disable.value
        self._frontend: Frontend | None = None
        self._closed = False

    def get(self, request: Request) -> CompiledKernel:
        """Return the kernel of a request that missed; wait if somebody else compiles it.

        Raises:
            CompileError: the compiler refused it; CompilerNotFoundError: there is none; MissError:
                the settings allow no compile.
        """
        manifest: Manifest | None = None
        # Nobody else can use what is not to be stored, so everybody compiles it at once.
        if not self.finder.reads:
            if self._writes and not request.self_contained:
                manifest = self.finder.headers.manifest(request)
            return self._compile(request, manifest)[0]

        def find() -> CompiledKernel | None:
            nonlocal manifest
            kernel, manifest = self.finder.look(request, time.perf_counter(), again=True)
            return kernel

        def make() -> tuple[CompiledKernel, Found | None]:
            return self._ask_or_compile(request, manifest)

        return self.finder.engine.flight.run(
            request.key,
            find,
            make,
            partial(self._adopt, request),
            asker=request.location + request.source_name,
            timeless=request.self_contained,
        )

    def _adopt(self, request: Request, made: Found) -> CompiledKernel | None:
        """Return the kernel that another thread has compiled meanwhile, if it is good here, too.

        It is not good if a header was edited after that compile had read it, or if it was compiled
        in another place.
        """
        kernel, header_set = made
        if header_set is not None:
            at_home = header_set.sections().home == request.location  # so that its log is right
            if not (at_home and header_set.holds(request, self.finder.headers.digests)):
                return None
            if header_set.result_key(request.key) != kernel.key:
                return None
            kernel = kernel._replace(dependencies=header_set.dependencies(request))
        elif not request.self_contained:
            return None
        self.finder.counts.adopted(kernel)
        return kernel._replace(cached=True)

    def find_remotely(
        self, request: Request, started: float, manifest: Manifest | None
    ) -> CompiledKernel | None:
        """Return the kernel if a remote has it, counted as a hit."""
        if self.remotes is None or started < self.remotes.client.nothing_until:
            return None
        found = self.remotes.find(request, started, manifest)
        return None if found is None else found[0]

    def close(self) -> None:
        """Disconnect. Idempotent.

        The kernel of a compile that another thread has begun is not stored.
        """
        self._closed = True
        if self.remotes is not None:
            self.remotes.close()

    # -- remotes, compile, store -------------------------------------------------------------------

    def _ask_or_compile(
        self, request: Request, manifest: Manifest | None
    ) -> tuple[CompiledKernel, Found | None]:
        """Return the kernel from a remote; otherwise compile it as the only machine."""
        if self.remotes is None:
            return self._compile(request, manifest)
        found, lease = self.remotes.find_or_lease(request, manifest)
        if found is not None:
            return found[0], found
        try:
            return self._compile(request, manifest, lease)
        finally:
            if lease is not None:
                self.remotes.release(lease)

    def _compile(
        self, request: Request, manifest: Manifest | None, lease: Lease | None = None
    ) -> tuple[CompiledKernel, Found | None]:
        """Compile a request, counted as a miss; return the kernel, and what others may adopt.

        It is stored if it may be stored. `manifest` is the one that is stored now. `lease` is
        returned when the kernel has reached the remotes.
        """
        if self._config.on_miss.value == "error":
            self.finder.counts.miss()
            raise _refusal(self.finder, self._config, request)
        self.finder.counts.miss()
        compiled, header_set = self._run(request)
        ran = self._for_compiler(request, compiled.identity)
        if ran is not request:  # the library was replaced
            request, manifest = ran, self.finder.headers.manifest(ran)
        # After `close`, the client has left, so no result is written any more.
        if compiled.problem or self._closed:
            return CompiledKernel.of(compiled, request.key, ()), None
        kernel, entry = _store(self.finder, request, compiled, header_set, manifest)
        if self.remotes is not None:
            self.remotes.upload(request, header_set, kernel.key, entry, lease)
        return kernel, (kernel, header_set)

    def _run(self, request: Request) -> tuple[Compiled, StoredHeaderSet | None]:
        """Run the compiler, counted, and logged with the reason."""
        why = _reason(self.finder, self._config, request) if log.debugging() else ""
        try:
            compiled, header_set = self._front().compile(request, track=self._writes)
        except CompileError:
            if why:
                log.debug("miss: %s does not compile", _title(request))
            raise
        if why:
            names = CompiledKernel.of(compiled, "", ()).functions()
            log.debug("miss: %s is compiled: %s", _title(request, names), why)
        engine = self.finder.engine
        engine.counters.add("compiles")
        engine.counters.add("compile_seconds", compiled.artifact.seconds)
        if not request.names and request.caller is None:
            warn_if_empty(CompiledKernel.of(compiled, "", ()), request.source, request.source_name)
        if compiled.problem and self._writes:
            engine.counters.add("uncacheable")
            log.debug("%s is not cached: %s", request.source_name, compiled.problem)
            engine.note("uncacheable", request.key, compiled.problem)
        return compiled, header_set

    def _front(self) -> Frontend:
        if self._frontend is None:
            from kcache.nvrtc.compiler import Limits  # a waiting thread needs none
            from kcache.nvrtc.frontend import Frontend
            from kcache.nvrtc.workers.slots import Slots

            config, files = self._config, self._directory
            slots = None if files is None else Slots(files.slots, config.wait.value)
            limits = Limits(config.workers.value, config.compile_timeout.value, slots)
            self._frontend = Frontend(self.finder.headers.digests, limits)
        return self._frontend


# -- store -----------------------------------------------------------------------------------------


def _store(
    finder: Finder,
    request: Request,
    compiled: Compiled,
    header_set: StoredHeaderSet | None,
    manifest: Manifest | None,
) -> tuple[CompiledKernel, Entry]:
    """Store a compiled kernel; return it and its entry.

    Args:
        finder: of the cache.
        request: the request.
        compiled: what the compiler returned.
        header_set: the header set of its compile, None for a self-contained request.
        manifest: of the request, as it is stored.
    """
    from kcache.nvrtc.manifest import Manifest
    from kcache.nvrtc.metadata import metadata_of  # a waiting thread needs none of these

    key, dependencies = request.key, tuple[str, ...]()
    if header_set is not None:
        key, dependencies = header_set.result_key(key), header_set.dependencies(request)
    kernel = CompiledKernel.of(compiled, key, dependencies)
    finder.counts.saved(key, 0.0)
    engine, headers = finder.engine, finder.headers
    about = metadata_of(request, key, compiled.version)
    entry, done = kernel.to_entry(about, request.search), Put.FAILED
    try:
        # The kernel comes first: a manifest must not promise a kernel that is not there.
        done = engine.put(key, entry)
        if done and header_set is not None:
            header_set.remember(request)
            merged = Manifest(list(manifest.header_sets) if manifest is not None else [])
            merged.add(header_set)
            merged.checked[request.location] = header_set
            done = headers.put(request, merged)
    except (ConfigError, OSError) as error:
        engine.report("store", error)
    if key != request.key and done in (Put.TOO_LARGE, Put.NO_ROOM):
        engine.note("rejected", request.key)  # the next request asks for it by this key
    return kernel, entry


# -- why it is compiled ----------------------------------------------------------------------------


def _refusal(finder: Finder, config: Config, request: Request) -> MissError:
    """Return the error for a request that the settings allow no compile for."""
    value, source = config.on_miss
    setting = "on_miss" if source == "argument" else source
    what = f"{_title(request)} is not in the cache, and {setting}={value} allows no compile"
    why = _reason(finder, config, request)
    return MissError(f"{what}: {why}", source_name=request.source_name)


def _reason(finder: Finder, config: Config, request: Request) -> str:
    """Return why a request is compiled, as `kcache why` says it."""
    from kcache.admin.explain import explain  # few programs ask

    try:
        return explain(finder.engine, request, config, digests=finder.headers.digests).clauses
    except Exception as error:  # a reason that can't be found must not cost a kernel
        return f"the reason is unknown ({error!r})"


def warn_if_empty(kernel: CompiledKernel, source: str, name: str) -> None:
    """Warn once about a source with templates of which no instance was compiled."""
    templates = templates_in(source)
    if templates and kernel.ptx is not None and not kernel.functions():
        log.warning_once(
            f"there is no kernel in {name}: no instance of its template {templates[0]} is named; "
            f"expected a name expression, such as {templates[0]}<float>"
        )


def _title(request: Request, names: Sequence[str] = ()) -> str:
    """Return the source and its kernels; before the compile, those that request or source name."""
    from kcache.nvrtc.metadata import title_of

    return title_of(request.source_name, names or request.kernels())
