"""Resolver: what happens to a request that missed, from top to bottom.

1. `Resolver.get`: one thread of one process goes on, and the others wait (`engine.single_flight`).
2. `Resolver.compute`: the request is compiled (`compile`), and the outcome is compared with what
   was compiled under other paths (`relocation`).
3. The kernel and its manifest are stored (`store`).
4. Those who waited find the kernel in the cache (`find`), or adopt what was compiled.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from kcache.engine.single_flight import Made, Work
from kcache.errors import CompileError
from kcache.kernels.compiled_kernel import CompiledKernel

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from kcache.engine.single_flight import Busy, Flight
    from kcache.kernels.compile import RequestCompiler
    from kcache.kernels.find import Finder
    from kcache.nvrtc.files import FileDigests
    from kcache.nvrtc.frontend import Frontend
    from kcache.nvrtc.manifest import Variant
    from kcache.nvrtc.request import Request

__all__ = ["Answer", "Factories", "Resolver"]


class Answer(NamedTuple):
    """A kernel, and the header set that it was compiled with if it was compiled just now."""

    kernel: CompiledKernel
    variant: Variant | None = None


class Factories(NamedTuple):
    """What a resolver needs beside the cache; each is called when it is first needed.

    Attributes:
        frontend: builds the compiler's frontend.
        flight: builds the single flight.
        for_compiler: returns the request for the compiler that has run, by its identity.
    """

    frontend: Callable[[FileDigests], Frontend]
    flight: Callable[[], Flight[Answer]]
    for_compiler: Callable[[Request, str], Request]


class Resolver:
    """Answers requests that were not found: has each compiled once, and stored.

    Threads: safe to share. Processes: by the lock file, one of them compiles a kernel. Crash and
    fork: as `Flight`.

    Args:
        finder: of the cache that missed.
        factories: of what is built when it is first needed.
        writes: whether what was compiled is stored.

    Attributes:
        finder: as given.
    """

    def __init__(self, finder: Finder, factories: Factories, *, writes: bool) -> None:
        self.finder = finder
        self._factories = factories
        self._writes = writes
        self._compiler: RequestCompiler | None = None
        self._flight: Flight[Answer] | None = None

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

    def compute(self, request: Request) -> Made[Answer]:
        """Compile a request, counted as a miss, and store the outcome if that is right.

        Raises:
            CompileError: the compiler refused it; CompilerNotFoundError: there is none.
        """
        from kcache.kernels.relocation import proven_elsewhere  # a thread that waits needs none
        from kcache.kernels.store import KernelWriter

        started = time.perf_counter()
        self.finder.counts.miss()
        if self._compiler is None:
            self._compiler = self._build_compiler()
        request, outcome = self._compiler.compile(request)
        if outcome.uncacheable is not None:
            kernel = CompiledKernel.of(outcome.compiled, request.key, ())
            return Made(Answer(kernel), reusable=False, stored=False)
        proven = proven_elsewhere(self.finder, request, outcome) if self._writes else None
        variant = outcome.variant if proven is None else proven
        kernel, stored = KernelWriter(self.finder).store(request, outcome.compiled, variant)
        if proven is not None and self.finder.reads:
            kernel = self._as_hit(kernel, started)
        return Made(Answer(kernel, variant), reusable=True, stored=stored)

    def adopt(self, request: Request, answer: Answer) -> Answer | None:
        """Return what another thread has compiled meanwhile, if it is good for this request, too.

        It is no good if a header was edited after that compile had read it.
        """
        kernel, variant = answer
        if variant is not None:
            if not variant.holds(request.search, self.finder.headers.digests, request.location):
                return None
            if not variant.good_at(request.location) or (
                variant.result_key(request.key) != kernel.key
            ):
                return None
            paths = variant.dependencies(request.search, request.location)
            kernel = kernel.replace(dependencies=paths)
        elif not request.self_contained:
            return None
        self.finder.counts.adopted(kernel)
        return Answer(kernel.replace(cached=True))

    def close(self) -> None:
        """Close the lock file. Idempotent."""
        if self._flight is not None:
            self._flight.close()

    def _build_compiler(self) -> RequestCompiler:
        from kcache.kernels.compile import RequestCompiler

        return RequestCompiler(self.finder, self._factories, writes=self._writes)

    def _is_shared(self, request: Request) -> bool:
        """Tell whether the outcome is for others, too, so that one compile is enough."""
        return self.finder.reads and request.uncacheable() is None

    def _as_hit(self, kernel: CompiledKernel, started: float) -> CompiledKernel:
        """Count a compile as a hit: it only proved that the cached kernel is good here, too.

        It took the time of a compile, so no time is saved.
        """
        self.finder.counts.miss(-1)
        self.finder.engine.counters.hit(0.0, time.perf_counter() - started, False)
        return kernel.replace(cached=True)

    def _flights(self) -> Flight[Answer]:
        if self._flight is None:
            with self.finder.engine.counters.lock:
                if self._flight is None:
                    self._flight = self._factories.flight()
        return self._flight


class _Miss:
    """One request on its way through the flight; counts the miss if it leads nowhere."""

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
        # The leader's miss is counted where it compiles; here that of a thread which waited for it.
        if kind is not None and issubclass(kind, CompileError) and not self._compiled:
            self._resolver.finder.counts.miss()

    def _find(self) -> Answer | None:
        kernel = self._resolver.finder.find(self._request, time.perf_counter(), again=True)
        return None if kernel is None else Answer(kernel)

    def _compute(self) -> Made[Answer]:
        self._compiled = True
        return self._resolver.compute(self._request)

    def _adopt(self, answer: Answer) -> Answer | None:
        return self._resolver.adopt(self._request, answer)
