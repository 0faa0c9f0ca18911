"""Resolver: handles a request that missed, from beginning to end.

1. One thread of one process becomes the leader, and the other threads and processes wait for it
   (`engine.single_flight`).
2. The leader looks up the kernel again, first in the tiers, then in the remotes (`remotes`). It may
   wait there for another machine's compile.
3. If there is still no kernel, the leader compiles the request (`nvrtc.compiler`). The kernel is
   stored before its manifest, so that no manifest names a kernel that was never stored, even if the
   process is killed. If two processes store dependency sets of one request at the same time, one
   set may be lost, and its kernel is compiled again.
4. The threads that waited find the kernel in the cache, or use the leader's result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from kcache.engine.engine import Put
from kcache.errors import CompileError, ConfigError, MissError
from kcache.gpu_code import templates_in
from kcache.kernels.batch import Progress, compile_all
from kcache.kernels.compiled_kernel import CompiledKernel
from kcache.kernels.explain import explain
from kcache.kernels.request_factory import with_target
from kcache.nvrtc.compiler import Limits, compile_request, compile_tracked
from kcache.nvrtc.metadata import metadata_of
from kcache.nvrtc.options import CompileOptions
from kcache.nvrtc.request import DEFAULT_NAME, Request, title_of
from kcache.nvrtc.workers.slots import Slots
from kcache.util import log
from kcache.util.forks import importing

if TYPE_CHECKING:
    from kcache.engine.opening import OpenedBackend
    from kcache.kernels.lookup import Lookup, Tiers
    from kcache.kernels.remotes import RemoteTier
    from kcache.nvrtc.compiler import Compiled
    from kcache.nvrtc.manifest import DependencySet
    from kcache.remote.daemon_client import Lease


class Resolver:
    """Answers requests that missed: compiles each kernel once, and stores it.

    Threads: may be called from several threads at the same time. Processes: one process acquires a
    lock and compiles a kernel, and the others wait for the kernel, up to the setting `wait`. Crash:
    if the process that compiles is killed, one of those that wait compiles. Fork: a forked child
    starts without compiles and without locks.

    Args:
        tiers: the tiers of the cache that missed.
        opened: the directory of the cache, with its settings.
        for_compiler: called with a request and the identity of the compiler that has compiled it;
            returns the request for that compiler.

    Attributes:
        tiers: as given.
        remotes: the remotes. A kernel is looked up there before it is compiled, and uploaded
            afterwards. None if there are no remotes.
    """

    def __init__(
        self,
        tiers: Tiers,
        opened: OpenedBackend,
        for_compiler: Callable[[Request, str], Request],
    ) -> None:
        self.tiers = tiers
        self._engine = tiers.engine
        self._flight = tiers.engine.flight
        self._config = config = opened.config
        self.remotes: RemoteTier | None = None
        if config.remotes:
            with importing:
                from kcache.kernels.remotes import RemoteTier, open_remotes  # noqa: PLC0415  13 ms

            client = open_remotes(config)
            if client is not None:
                self.remotes = RemoteTier(tiers, client, wait=config.wait.value)
        self._for_compiler = for_compiler
        #: Whether kernels are stored; false if the cache is disabled or closed.
        self._stores = not config.disable.value
        files = None if self._engine.read_only else opened.directory
        slots = None if files is None else Slots(files.slots, config.wait.value)
        self._limits = Limits(config.workers.value, config.compile_timeout.value, slots)

    def get(self, request: Request) -> CompiledKernel:
        """Return the kernel of a request that missed; wait if another caller is compiling it.

        Raises:
            CompileError: the compiler rejected the source.
            CompilerNotFoundError: NVRTC is not installed.
            MissError: the setting `on_miss` allows no compile.
        """
        reads, scope = self.tiers.reads, request.location + request.source_name
        asked: AbstractContextManager[tuple[Lookup | None, Lease | None]] = nullcontext((None,) * 2)
        if reads and self.remotes is not None:
            asked = self.remotes.found_or_leased(request)
        with self._flight.lead(
            request.key, scope=scope, shares_old_errors=request.self_contained
        ) as turn:
            for made in turn if reads else ():  # without lookups, each caller compiles
                kernel = self.tiers.hit(request, is_retry=True)
                if kernel is None and made is not None:
                    kernel = self._adopted(request, *made)
                if kernel is not None:
                    return kernel
            with asked as (found, lease):
                if found is not None and found.kernel is not None:
                    turn.result = found.kernel, found.dependency_set
                    return found.kernel
                compiled, dependency_set = self._compile(request)
                if compiled.problem or not self._stores:
                    return CompiledKernel.of(compiled, request.key)
                kernel = self._store(request, compiled, dependency_set, lease)
                turn.result = kernel, dependency_set
                return kernel

    def get_all(
        self, requests: Sequence[Request], *, jobs: int | None, progress: Progress | None
    ) -> list[CompiledKernel | CompileError]:
        """Return each request's kernel or error, in order; see `KernelCache.compile_many`."""
        return compile_all(self, requests, jobs=jobs, progress=progress)

    def close(self) -> None:
        """Disconnect from the remotes, and store no more kernels. Idempotent.

        A compile that another thread has begun still ends, but its kernel is not stored.
        """
        self._stores = False
        if self.remotes is not None:
            self.remotes.close()

    def _adopted(
        self, request: Request, kernel: CompiledKernel, dependency_set: DependencySet | None
    ) -> CompiledKernel | None:
        """Return the kernel that another thread has just made, if it is valid for this request.

        The kernel is not valid if a header was edited after the compile had read the header, or if
        the kernel was compiled at another location.
        """
        if dependency_set is not None:
            # At another location, the paths in the log would be wrong.
            at_home = dependency_set.answers().home == request.location
            if not (at_home and dependency_set.holds(request, self.tiers.local.digests)):
                return None
            if dependency_set.result_key(request.key) != kernel.key:
                return None
            kernel = kernel._replace(dependencies=dependency_set.dependencies(request))
        elif not request.self_contained:
            return None
        return self.tiers.adopted(kernel)

    def _compile(self, request: Request) -> tuple[Compiled, DependencySet | None]:
        """Count a miss, run the compiler, and log why the kernel was compiled.

        If the setting `on_miss` allows no compile, raise MissError instead.
        """
        engine, title, digests = self._engine, request.source_name, self.tiers.local.digests
        self.tiers.miss()
        if self._config.on_miss.value == "error":
            raise self._refusal(request)
        why = self._reason(request) if log.debugging() else ""
        dependency_set: DependencySet | None = None
        try:
            if request.start is not None:
                compiled, dependency_set = request.start.compile(digests)
            elif self._stores:
                compiled, dependency_set = compile_tracked(request, digests, self._limits)
            else:
                compiled = compile_request(request, self._limits)
        except CompileError:
            if why:
                log.debug("miss: %s does not compile", title_of(title, request.kernels()))
            raise
        kernel = CompiledKernel.of(compiled, request.key)
        if why:
            what = title_of(title, kernel.functions() or request.kernels())
            log.debug("miss: %s is compiled: %s", what, why)
        if not request.names and request.caller is None and request.start is None:
            warn_if_empty(kernel, request.source, title)
        engine.counters.add("compiles")
        engine.counters.add("compile_seconds", kernel.compile_seconds)
        if compiled.problem and self._stores:
            engine.counters.add("uncacheable")
            log.debug("%s is not cached: %s", title, compiled.problem)
            engine.note("uncacheable", request.key, compiled.problem)
        return compiled, dependency_set

    def _store(
        self,
        request: Request,
        compiled: Compiled,
        dependency_set: DependencySet | None,
        lease: Lease | None,
    ) -> CompiledKernel:
        """Store a kernel, then its dependency set, because no manifest may name a missing kernel.

        Then queue the upload of the kernel. When the upload has ended, the lease is released.
        """
        engine = self._engine
        if compiled.identity not in ("", request.compiler):
            request = self._for_compiler(request, compiled.identity)
        key, dependencies = request.key, tuple[str, ...]()
        if dependency_set is not None:
            key, dependencies = dependency_set.result_key(key), dependency_set.dependencies(request)
        kernel = CompiledKernel.of(compiled, key, dependencies)
        entry = kernel.to_entry(metadata_of(request, key, compiled.version), request.search)
        engine.counters.made(key)
        done = Put.FAILED
        try:
            done = engine.put(key, entry)
            if done and dependency_set is not None:
                done = self.tiers.local.merge(request, [dependency_set])
        except (ConfigError, OSError) as error:
            engine.report("store", error)
        if key != request.key and done in (Put.TOO_LARGE, Put.NO_ROOM):
            engine.note("rejected", request.key)  # `kcache why` looks for events of this key
        if self.remotes is not None:
            self.remotes.upload(request, dependency_set, key, entry, lease)
        return kernel

    # -- why it is compiled ------------------------------------------------------------------------

    def _refusal(self, request: Request) -> MissError:
        """Return the error for a miss that must not be compiled, because of `on_miss`."""
        value, source = self._config.on_miss
        setting = "on_miss" if source == "argument" else source
        title = title_of(request.source_name, request.kernels())
        what = f"{title} is not in the cache, and {setting}={value} allows no compile"
        name = request.source_name
        return MissError(f"{what}: {self._reason(request)}", source_name=name)

    def _reason(self, request: Request) -> str:
        """Return why a request is compiled, as `kcache why` prints it."""
        try:
            return explain(self._engine, request, self._config).clauses
        except Exception as error:  # a failure to explain must not fail the request
            return f"the reason is unknown ({error!r})"


def warn_if_empty(kernel: CompiledKernel, source: str, name: str) -> None:
    """Warn once if a source has kernel templates but no kernel was compiled."""
    templates = templates_in(source)
    if templates and kernel.ptx is not None and not kernel.functions():
        log.warning_once(
            f"{name} was compiled without a kernel, because no name expression names an instance "
            f"of its template {templates[0]}; expected one such as {templates[0]}<float>"
        )


def compile_to_ptx(
    source: str, options: CompileOptions | None = None
) -> tuple[bytes | None, bytes | None]:
    """Compile without a cache; return (PTX, CUBIN or None).

    PTX is None only if the options make LTOIR.

    Raises:
        ConfigError: either an argument is not allowed, or no architecture is given and there is no
            GPU.
        CompileError: the compiler rejected the source.
        CompilerNotFoundError: NVRTC is not installed.
    """
    request = Request.make(
        source, (), with_target(options), None, b"", source_name=DEFAULT_NAME, compiler=""
    )
    artifact = compile_request(request).artifact
    return artifact.ptx, artifact.cubin
