"""Resolver: handles a request that missed, from beginning to end.

1. `Resolver.get`: one thread of one process goes on, and the others wait (`engine.single_flight`).
2. `Resolver.compute`: if the cache has the kernel for another location, a compile may prove that it
   is good here, too (`proofs`).
3. Otherwise the request is compiled (`compile`). The kernel and its manifest are stored (`store`).
4. With eager relocation, a proof shows that the kernel is good in other locations (`proof_queue`).
5. The threads that waited find the kernel in the cache (`find`), or adopt the result.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

from kcache.engine.single_flight import Made, Work
from kcache.errors import CompileError
from kcache.kernels.compiled_kernel import CompiledKernel

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from typing import Self

    from kcache.config import Config
    from kcache.engine.single_flight import Busy, Flight
    from kcache.entry import Entry
    from kcache.kernels.compile import RequestCompiler
    from kcache.kernels.find import Finder
    from kcache.kernels.proof_queue import ProofQueue
    from kcache.kernels.remotes import RemoteKernels
    from kcache.nvrtc.files import FileDigests
    from kcache.nvrtc.frontend import Frontend
    from kcache.nvrtc.manifest import StoredHeaderSet
    from kcache.nvrtc.request import Request
    from kcache.remote.client import Lease

__all__ = ["Answer", "Factories", "Resolver"]


class Answer(NamedTuple):
    """A kernel, and the header set that it was compiled with if it was compiled just now."""

    kernel: CompiledKernel
    header_set: StoredHeaderSet | None = None


class Factories(NamedTuple):
    """The parts that a resolver needs beside the cache; each is built when it is first needed.

    Attributes:
        config: the settings.
        frontend: builds the compiler's frontend.
        flight: builds the single flight.
        for_compiler: returns the request for the compiler that has run, by its identity.
    """

    config: Config
    frontend: Callable[[FileDigests], Frontend]
    flight: Callable[[], Flight[Answer]]
    for_compiler: Callable[[Request, str], Request]


class Resolver:
    """Answers requests that missed: compiles each once, and stores it.

    Threads: safe to share. Processes: by the lock file, one of them compiles a kernel. Crash and
    fork: as `Flight`.

    Args:
        finder: of the cache that missed.
        factories: of the parts that are built when they are first needed.
        writes: whether compiled kernels are stored.
        eager: whether stored kernels are proven to be good in other locations, in the background.
        remotes: asked before a compile, and told of it; None if there are none.

    Attributes:
        finder, remotes: as given.
    """

    def __init__(
        self,
        finder: Finder,
        factories: Factories,
        *,
        writes: bool,
        eager: bool = False,
        remotes: RemoteKernels | None = None,
    ) -> None:
        self.finder = finder
        self.remotes = remotes
        self._factories = factories
        self._writes = writes
        self._eager = eager
        self._proofs: ProofQueue | None = None
        self._compiler: RequestCompiler | None = None
        self._flight: Flight[Answer] | None = None
        self._closed = False

    def get(self, request: Request) -> CompiledKernel:
        """Return the kernel of a request that missed; wait if somebody else compiles it.

        Raises:
            CompileError: the compiler refused it; CompilerNotFoundError: there is none.
        """
        if not self._is_shared(request):
            return self.compute(request).value.kernel
        with _Miss(self, request) as miss:
            return self._flights().run(request.key, miss.work()).kernel

    def attempt(self, request: Request, busy: Busy | None = None) -> Answer | Busy:
        """Return the answer, or `Busy` if somebody else compiles it; see `Flight.attempt`.

        Raises:
            CompileError: the compiler refused it; CompilerNotFoundError: there is none.
        """
        if not self._is_shared(request):
            return self.compute(request).value
        with _Miss(self, request) as miss:
            return self._flights().attempt(request.key, miss.work(), busy)

    def compute(self, request: Request, lease: Lease | None = None) -> Made[Answer]:
        """Compile a request, counted as a miss, and store the outcome if it may be stored.

        `lease` is returned when the outcome has reached the remotes.

        Raises:
            CompileError: the compiler refused it; CompilerNotFoundError: there is none; MissError:
                the settings allow no compile.
        """
        from kcache.kernels.store import KernelWriter  # a waiting thread needs none

        started = time.perf_counter()
        if self._factories.config.on_miss.value == "error":
            self.finder.counts.miss()
            raise self._compilers().refusal(request)
        if self._writes and self.finder.reads and not request.self_contained:
            proven = self._prove_here(request, started)
            if proven is not None:
                return Made(proven, reusable=True, stored=True)
        self.finder.counts.miss()
        request, outcome = self._compilers().compile(request)
        if outcome.uncacheable is not None:
            kernel = CompiledKernel.of(outcome.compiled, request.key, ())
            return Made(Answer(kernel), reusable=False, stored=False)
        if self._closed:  # the client has left, so no result is written any more
            kernel = CompiledKernel.of(outcome.compiled, request.key, ())
            return Made(Answer(kernel), reusable=False, stored=False)
        header_set = outcome.header_set
        upload = self._upload(request, header_set, lease)
        kernel, stored = KernelWriter(self.finder).store(
            request, outcome.compiled, header_set, upload
        )
        around = request.surroundings
        eager = self._eager or (around is not None and around.alone)
        if eager and stored and header_set is not None and header_set.may_be_good_elsewhere:
            self._queue().add(request, header_set)
        return Made(Answer(kernel, header_set), reusable=True, stored=stored)

    def adopt(self, request: Request, answer: Answer) -> Answer | None:
        """Return the kernel that another thread has compiled meanwhile, if it is good here, too.

        It is not good if a header was edited after that compile had read it.
        """
        kernel, header_set = answer
        if header_set is not None:
            if not header_set.holds(request.search, self.finder.headers.digests, request.location):
                return None
            if not header_set.good_at(request.location) or (
                header_set.result_key(request.key) != kernel.key
            ):
                return None
            paths = header_set.dependencies(request.search, request.location)
            kernel = kernel.replace(dependencies=paths)
        elif not request.self_contained or kernel.key not in (request.key, request.named_key):
            return None
        self.finder.counts.adopted(kernel)
        return Answer(kernel.replace(cached=True))

    def holding_proofs(self) -> AbstractContextManager[None]:
        """Begin no proof in the background during the block."""
        return self._queue().held() if self._eager else nullcontext()

    def finish_proofs(self) -> None:
        """Wait for all proofs, begun or not. An interrupt abandons them."""
        if self._proofs is not None:
            self._proofs.finish()

    def find_remotely(
        self, request: Request, started: float
    ) -> tuple[CompiledKernel | None, float]:
        """Return (the kernel if a remote has it, counted as a hit, when to ask again).

        Before that time of `time.perf_counter`, no remote will be asked.
        """
        if self.remotes is None:
            return None, math.inf
        found = self.remotes.find(request, started)
        return None if found is None else found.value.kernel, self.remotes.nothing_until

    def close(self) -> None:
        """Finish the proofs, close the lock file, and disconnect. Idempotent.

        The kernel of a compile that goes on in another thread is not stored.
        """
        self._closed = True
        try:
            self.finish_proofs()
        finally:
            if self.remotes is not None:
                self.remotes.close()
            if self._flight is not None:
                self._flight.close()

    def _upload(
        self, request: Request, header_set: StoredHeaderSet | None, lease: Lease | None
    ) -> Callable[[str, Entry], None] | None:
        """Return a function that sends a kernel's entry to the remotes, if there are any."""
        remotes = self.remotes
        if remotes is None:
            return None
        return lambda key, entry: remotes.upload(request, key, entry, header_set, lease)

    def _compilers(self) -> RequestCompiler:
        if self._compiler is None:
            from kcache.kernels.compile import RequestCompiler

            self._compiler = RequestCompiler(self.finder, self._factories, writes=self._writes)
        return self._compiler

    def _is_shared(self, request: Request) -> bool:
        """Tell whether others can use the outcome, too, so that one compile is enough."""
        return self.finder.reads and request.uncacheable() is None

    def _prove_here(self, request: Request, started: float) -> Answer | None:
        """Return a kernel of another location if a proof shows now that it is good here, too.

        The key's lock is held. The proof takes the time of a compile, so no time is saved.
        """
        from kcache.kernels.proofs import provable, prove
        from kcache.kernels.store import KernelWriter

        header_set = provable(self.finder, request)
        if header_set is None:
            return None
        verdict = prove(self.finder, self._compilers(), request, header_set)
        if verdict is None:
            return None
        judged = KernelWriter(self.finder).store_verdict(request, header_set, good=verdict.good)
        if not judged.good_at(request.location):
            return None
        if self.remotes is not None:
            self.remotes.upload_proven(request, judged)
        self.finder.counts.saved(verdict.kernel.key, 0.0)
        self.finder.engine.counters.hit(0.0, time.perf_counter() - started, False)
        paths = judged.dependencies(request.search, request.location)
        return Answer(verdict.kernel.replace(cached=True, dependencies=paths), judged)

    def _prove_later(self, request: Request, header_set: StoredHeaderSet) -> None:
        """Prove a stored kernel, and store the verdict; for the queue."""
        from kcache.kernels.proofs import prove
        from kcache.kernels.store import KernelWriter

        verdict = prove(self.finder, self._compilers(), request, header_set)
        if verdict is None:
            return

        def store() -> Made[Answer]:
            judged = KernelWriter(self.finder).store_verdict(request, header_set, good=verdict.good)
            return Made(Answer(verdict.kernel, judged), reusable=True, stored=True)

        def adopt(_: Answer) -> Answer | None:
            return None

        # Under the key's lock, so that no header set of another process is lost.
        work: Work[Answer] = Work(lambda: None, store, adopt, location=request.location)
        judged = self._flights().run(request.key, work).header_set
        if verdict.good and judged is not None and self.remotes is not None:
            self.remotes.upload_proven(request, judged)

    def _queue(self) -> ProofQueue:
        if self._proofs is None:
            from kcache.kernels.proof_queue import ProofQueue

            with self.finder.engine.counters.lock:
                if self._proofs is None:
                    self._proofs = ProofQueue(self._prove_later)
        return self._proofs

    def _flights(self) -> Flight[Answer]:
        if self._flight is None:
            with self.finder.engine.counters.lock:
                if self._flight is None:
                    self._flight = self._factories.flight()
        return self._flight


class _Miss:
    """One request on its way through the flight; counts the miss if it ends without an answer."""

    def __init__(self, resolver: Resolver, request: Request) -> None:
        self._resolver = resolver
        self._request = request
        self._compiled = False

    def work(self) -> Work[Answer]:
        request = self._request
        return Work(
            self._find,
            self._compute,
            self._adopt,
            timeless=request.self_contained,
            location=request.location,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A leader counts its miss when it compiles. This counts the miss of a thread that waited
        # for it.
        if kind is not None and issubclass(kind, CompileError) and not self._compiled:
            self._resolver.finder.counts.miss()

    def _find(self) -> Answer | None:
        kernel = self._resolver.finder.find(self._request, time.perf_counter(), again=True)
        return None if kernel is None else Answer(kernel)

    def _compute(self) -> Made[Answer]:
        self._compiled = True
        resolver, request = self._resolver, self._request
        if resolver.remotes is None:
            return resolver.compute(request)
        return resolver.remotes.compute(request, lambda lease: resolver.compute(request, lease))

    def _adopt(self, answer: Answer) -> Answer | None:
        return self._resolver.adopt(self._request, answer)
