"""Resolver: handles a request that missed, from beginning to end.

1. `Resolver.answer`: one thread of one process goes on, and the others wait for it
   (`engine.single_flight`). It looks again (`find`), and asks remotes (`remotes`).
2. If the cache has the kernel for another location, a compile may prove that it is good here, too
   (`proofs`).
3. Otherwise the request is compiled (`nvrtc.frontend`). The kernel and its manifest are stored
   (`store`).
4. With eager relocation, a proof shows that the kernel is good in other locations (`proofs`).
5. The threads that waited find the kernel in the cache, or adopt the answer.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from kcache.errors import CompileError, MissError
from kcache.kernels.compiled_kernel import CompiledKernel
from kcache.util import log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from kcache.config import Config
    from kcache.engine.opening import OpenedBackend
    from kcache.entry import Entry
    from kcache.kernels.find import Finder
    from kcache.kernels.proofs import ProofQueue
    from kcache.kernels.remotes import RemoteKernels
    from kcache.kernels.sources import Found
    from kcache.nvrtc.frontend import Frontend, Outcome
    from kcache.nvrtc.manifest import Manifest, StoredHeaderSet
    from kcache.nvrtc.request import Request
    from kcache.remote.client import Lease

__all__ = ["Resolver", "build_resolver"]


class Resolver:
    """Answers requests that missed: compiles each once, and stores it.

    Threads: safe to share. Processes: by the lock file, one of them compiles a kernel. Crash and
    fork: as `Flight`.

    Args:
        finder: of the cache that missed.
        config: the settings.
        build_frontend: builds the compiler's frontend when it is first needed; who waits needs
            none.
        for_compiler: returns the request for the compiler that has run, by its identity.
        eager: whether stored kernels are proven to be good in other locations, in the background.
        remotes: asked before a compile, and told of it; None if there are none.

    Attributes:
        finder, remotes: as given.
    """

    def __init__(
        self,
        finder: Finder,
        config: Config,
        build_frontend: Callable[[], Frontend],
        for_compiler: Callable[[Request, str], Request],
        *,
        eager: bool = False,
        remotes: RemoteKernels | None = None,
    ) -> None:
        self.finder = finder
        self.remotes = remotes
        self._config = config
        self._build_frontend = build_frontend
        self._for_compiler = for_compiler
        self._writes = not config.disable.value
        self._eager = eager
        self._frontend: Frontend | None = None
        self._proofs: ProofQueue | None = None
        self._closed = False

    def get(self, request: Request) -> CompiledKernel:
        """Return the kernel of a request that missed; wait if somebody else compiles it.

        Raises:
            CompileError: the compiler refused it; CompilerNotFoundError: there is none; MissError:
                the settings allow no compile.
        """
        return self.answer(request)[0]

    def answer(self, request: Request) -> Found:
        """Return the kernel, and the header set that it was compiled with; raises as `get`."""
        manifest: Manifest | None = None
        # Nobody else can use what is not to be stored, so everybody compiles it at once.
        if not self.finder.reads:
            if self._writes and not request.self_contained:
                manifest = self.finder.headers.manifest(request)
            return self._compile(request, manifest)[0]

        def find() -> Found | None:
            nonlocal manifest
            kernel, manifest = self.finder.look(request, time.perf_counter(), again=True)
            return None if kernel is None else (kernel, None)

        def make() -> tuple[Found, tuple[Found, str] | None]:
            if self.remotes is None:
                found, shared = self._compile(request, manifest)
            else:
                found, shared = self._ask(self.remotes, request, manifest)
            return found, None if shared is None else (shared, request.source_name)

        return self.finder.engine.flight.run(
            request.key,
            find,
            make,
            partial(self.adopt, request),
            asker=request.location + request.source_name,
            timeless=request.self_contained,
        )

    def adopt(self, request: Request, made: tuple[Found, str]) -> Found | None:
        """Return the kernel that another thread has compiled meanwhile, if it is good here, too.

        It is not good if a header was edited after that compile had read it, or if it was compiled
        in another place. `made` has the name of the source, too.
        """
        (kernel, header_set), name = made
        if header_set is not None:
            if not header_set.holds(request.search, self.finder.headers.digests, request.location):
                return None
            if header_set.result_key(request.key) != kernel.key:
                return None
            paths = header_set.dependencies(request.search, request.location)
            kernel = kernel._replace(dependencies=paths)
        elif not request.self_contained or name != request.source_name:
            return None
        self.finder.counts.adopted(kernel)
        return kernel._replace(cached=True), header_set

    def holding_proofs(self) -> AbstractContextManager[None]:
        """Begin no proof in the background during the block."""
        return self._queue().held() if self._eager else nullcontext()

    def finish_proofs(self) -> None:
        """Wait for all proofs, begun or not. An interrupt abandons them."""
        if self._proofs is not None:
            self._proofs.finish()

    def find_remotely(
        self, request: Request, started: float, manifest: Manifest | None
    ) -> CompiledKernel | None:
        """Return the kernel if a remote has it, counted as a hit."""
        if self.remotes is None or started < self.remotes.nothing_until:
            return None
        found = self.remotes.find(request, started, manifest)
        return None if found is None else found[0]

    def close(self) -> None:
        """Finish the proofs, and disconnect. Idempotent.

        The kernel of a compile that goes on in another thread is not stored.
        """
        self._closed = True
        try:
            self.finish_proofs()
        finally:
            if self.remotes is not None:
                self.remotes.close()

    # -- remotes, proof, compile, store ------------------------------------------------------------

    def _ask(
        self, remotes: RemoteKernels, request: Request, manifest: Manifest | None
    ) -> tuple[Found, Found | None]:
        """Return the kernel from a remote; otherwise compile it as the only machine."""
        found, lease = remotes.find_or_lease(request, manifest)
        if found is not None:
            return found, found
        try:
            return self._compile(request, manifest, lease)
        finally:
            if lease is not None:
                remotes.release(lease)

    def _compile(
        self, request: Request, manifest: Manifest | None, lease: Lease | None = None
    ) -> tuple[Found, Found | None]:
        """Compile a request, counted as a miss; return the outcome, and what others may adopt.

        It is stored if it may be stored. `manifest` is the one that is stored now. `lease` is
        returned when the outcome has reached the remotes.
        """
        from kcache.kernels.store import store  # a waiting thread needs none

        if self._config.on_miss.value == "error":
            self.finder.counts.miss()
            raise _refusal(self.finder, self._config, request)
        provable = request.self_contained or manifest is not None
        if provable and self._writes and self.finder.reads:
            proven = self._prove_here(request, manifest)
            if proven is not None:
                return proven, proven
        self.finder.counts.miss()
        outcome = self._run(request)
        ran = self._for_compiler(request, outcome.identity)
        if ran is not request:  # the library was replaced
            request, manifest = ran, self.finder.headers.manifest(ran)
        # After `close`, the client has left, so no result is written any more.
        if outcome.uncacheable is not None or self._closed:
            return (CompiledKernel.of(outcome.compiled, request.key, ()), None), None
        header_set, upload = outcome.header_set, None
        remotes = self.remotes
        if remotes is not None:

            def upload(key: str, entry: Entry) -> None:
                remotes.upload(request, key, entry, header_set, lease)

        kernel, stored = store(
            self.finder, request, outcome.compiled, header_set, manifest=manifest, upload=upload
        )
        around = request.caller
        eager = self._eager or (around is not None and around.alone)
        if eager and stored and _may_be_good_elsewhere(request, kernel.key, header_set):
            self._queue().add(request, header_set)
        found = kernel, header_set
        return found, found

    def _run(self, request: Request) -> Outcome:
        """Run the compiler, counted and logged."""
        outcome = self._logged(request) if log.debugging() else self._outcome(request)
        uncacheable = outcome.uncacheable if self._writes else None
        engine = self.finder.engine
        engine.counters.add("compiles")
        engine.counters.add("compile_seconds", outcome.compiled.seconds)
        if uncacheable is not None:
            engine.counters.add("uncacheable")
            log.debug("%s is not cached: %s", request.source_name, uncacheable)
            engine.note("uncacheable", request.key, uncacheable)
        return outcome

    def _logged(self, request: Request) -> Outcome:
        """Run the compiler, and log for which reason."""
        why = _reason(self.finder, self._config, request)
        try:
            outcome = self._outcome(request)
        except CompileError:
            log.debug("miss: %s does not compile", _title(request))
            raise
        names = CompiledKernel.of(outcome.compiled, "", ()).functions()
        log.debug("miss: %s is compiled: %s", _title(request, names), why)
        return outcome

    def _outcome(self, request: Request) -> Outcome:
        return self._front().compile(request, track=self._writes)

    def _front(self) -> Frontend:
        if self._frontend is None:
            self._frontend = self._build_frontend()
        return self._frontend

    # -- proofs ------------------------------------------------------------------------------------

    def _prove_here(self, request: Request, manifest: Manifest | None) -> Found | None:
        """Return a kernel of another place if a proof shows now that it is good here, too.

        The key's lock is held. The proof takes the time of a compile, so no time is saved.
        """
        from kcache.kernels.proofs import prove
        from kcache.kernels.store import store_verdict

        started = time.perf_counter()
        header_set = None
        if manifest is not None:
            digests = self.finder.headers.digests
            header_set = manifest.provable(request.search, digests, request.location)
        if header_set is None and not request.self_contained:
            return None
        verdict = prove(self.finder, self._front(), request, header_set)
        if verdict is None or not store_verdict(
            self.finder, request, header_set, manifest, verdict
        ):
            return None
        proven, kernel = verdict.header_set, verdict.kernel._replace(cached=True)
        if self.remotes is not None:
            self.remotes.upload_proven(request, proven)
        self.finder.counts.saved(kernel.key, 0.0)
        self.finder.engine.counters.hit(0.0, time.perf_counter() - started, False)
        if proven is not None:
            paths = proven.dependencies(request.search, request.location)
            kernel = kernel._replace(dependencies=paths)
        return kernel, proven

    def _prove_later(self, request: Request, header_set: StoredHeaderSet | None) -> None:
        """Prove a stored kernel, and store the verdict; for the queue."""
        from kcache.kernels.proofs import prove
        from kcache.kernels.store import store_verdict

        finder = self.finder
        verdict = prove(finder, self._front(), request, header_set)
        if verdict is None:
            return

        def judge() -> tuple[bool, None]:
            now = None if header_set is None else finder.headers.manifest(request)
            return store_verdict(finder, request, header_set, now, verdict), None

        # Under the key's lock, so that no header set of another process is lost.
        good = finder.engine.flight.run(request.key, lambda: None, judge, lambda _: None)
        if good and self.remotes is not None:
            self.remotes.upload_proven(request, verdict.header_set)

    def _queue(self) -> ProofQueue:
        if self._proofs is None:
            from kcache.kernels.proofs import ProofQueue

            with self.finder.engine.counters.lock:
                if self._proofs is None:
                    self._proofs = ProofQueue(self._prove_later)
        return self._proofs


def _may_be_good_elsewhere(request: Request, key: str, header_set: StoredHeaderSet | None) -> bool:
    """Tell whether others may ask for a kernel from another place, where a proof would decide."""
    if header_set is not None:
        return header_set.may_be_good_elsewhere
    # Without headers, the place is the source's name, which is the same everywhere if it is plain.
    return not request.has_name and key == request.key and "/" in request.source_name


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
    from kcache.admin.explain import explain, set_aside  # few programs ask

    digests, aside = finder.headers.digests, set_aside(config)
    try:
        return explain(finder.engine, request, set_aside=aside, digests=digests).clauses
    except Exception as error:  # a reason that can't be found must not cost a kernel
        return f"the reason is unknown ({error!r})"


def _title(request: Request, names: Sequence[str] = ()) -> str:
    """Return the source and its kernels; before the compile, those that request or source name."""
    from kcache.nvrtc.inventory import title_of

    return title_of(request.source_name, names or request.kernels())


# -- from the settings -----------------------------------------------------------------------------


def build_resolver(
    finder: Finder, opened: OpenedBackend, for_compiler: Callable[[Request, str], Request]
) -> Resolver:
    """Return the resolver of a cache.

    Args:
        finder: of the cache.
        opened: its directory, with its settings.
        for_compiler: see `Resolver`.
    """
    config = opened.config

    def build_frontend() -> Frontend:
        from kcache.nvrtc.compiler import Limits  # a waiting thread needs none
        from kcache.nvrtc.frontend import Frontend
        from kcache.nvrtc.workers.slots import Slots

        shared = None if finder.engine.read_only else opened.directory
        slots = None if shared is None else Slots(shared.slots, config.wait.value)
        limits = Limits(config.workers.value, config.compile_timeout.value, slots)
        return Frontend(finder.headers.digests, limits)

    return Resolver(
        finder,
        config,
        build_frontend,
        for_compiler,
        eager=_proves_eagerly(config),
        remotes=_remotes(finder, config) if config.remote.value else None,
    )


def _remotes(finder: Finder, config: Config) -> RemoteKernels | None:
    from kcache.kernels.tiers import build_remotes  # few programs use remotes

    return build_remotes(finder, config)


def _proves_eagerly(config: Config) -> bool:
    """Tell whether kernels are proven to be good elsewhere right after their first compile.

    By default they are if they are made for others, that is with a writable remote. The argument or
    the variable overrides that.
    """
    value, source = config.relocation
    for_others = any(each.writable for each in config.remote.value) and not config.read_only.value
    return value == "eager" or (source == "default" and for_others)
