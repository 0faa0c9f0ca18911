"""Compile: runs the compiler once for a request that missed, logs it and counts it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kcache.engine.journal import UNCACHEABLE
from kcache.errors import CompileError, MissError
from kcache.kernels.compiled_kernel import CompiledKernel
from kcache.util import log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kcache.kernels.find import Finder
    from kcache.kernels.resolver import Factories
    from kcache.nvrtc.frontend import Frontend, Outcome, Proof
    from kcache.nvrtc.manifest import StoredHeaderSet
    from kcache.nvrtc.request import Request

__all__ = ["RequestCompiler"]


class RequestCompiler:
    """Compiles requests through a frontend, and counts the compiles. Stores nothing.

    Threads: safe to share.

    Args:
        finder: of the cache that missed.
        factories: of the frontend, and of the request for the compiler that has run.
        writes: whether the compiled kernels will be stored.
    """

    def __init__(self, finder: Finder, factories: Factories, *, writes: bool) -> None:
        self._finder = finder
        self._factories = factories
        self._writes = writes
        self._frontend: Frontend | None = None

    def compile(self, request: Request) -> tuple[Request, Outcome]:
        """Compile a request; return it as a request for the compiler that ran, and the outcome.

        Raises:
            CompileError: the compiler refused it; CompilerNotFoundError: there is none.
        """
        reason = self._why(request) if log.debugging() else ""
        try:
            outcome = self._front().compile(request, track=self._writes)
        except CompileError:
            log.debug("miss: %s does not compile", _title(request))
            raise
        if reason:
            names = CompiledKernel.of(outcome.compiled, "", ()).functions()
            log.debug("miss: %s is compiled: %s", _title(request, names), reason)
        request = self._factories.for_compiler(request, outcome.identity)
        self._count(outcome)
        if self._writes and outcome.uncacheable is not None:
            log.debug("%s is not cached: %s", request.source_name, outcome.uncacheable)
            self._finder.engine.journal.note(UNCACHEABLE, request.key, outcome.uncacheable)
        return request, outcome

    def compile_elsewhere(self, request: Request, header_set: StoredHeaderSet) -> Proof:
        """Compile a stored kernel as if its include directories were elsewhere; see `Frontend`.

        Raises:
            CompilerNotFoundError: there is no compiler.
        """
        proof = self._front().compile_elsewhere(request, header_set)
        self._finder.engine.counters.add("proofs")
        return proof

    def _front(self) -> Frontend:
        if self._frontend is None:
            self._frontend = self._factories.frontend(self._finder.headers.digests)
        return self._frontend

    def _count(self, outcome: Outcome) -> None:
        counters = self._finder.engine.counters
        counters.add("compiles")
        counters.add("compile_seconds", outcome.compiled.seconds)
        counters.add("uncacheable", self._writes and outcome.uncacheable is not None)

    def refusal(self, request: Request) -> MissError:
        """Return the error for a request that the settings allow no compile for."""
        value, source = self._factories.config.on_miss
        setting = "on_miss" if source == "argument" else source
        what = f"{_title(request)} is not in the cache, and {setting}={value} allows no compile"
        return MissError(f"{what}: {self._why(request)}", source_name=request.source_name)

    def _why(self, request: Request) -> str:
        """Return why a request is compiled, as `kcache why` says it."""
        from kcache.admin.explain import explain, set_aside  # few programs ask for this

        finder = self._finder
        digests, aside = finder.headers.digests, set_aside(self._factories.config)
        try:
            return explain(finder.engine, request, set_aside=aside, digests=digests).clauses
        except Exception as error:  # a reason that can't be found must not cost a kernel
            return f"the reason is unknown ({error!r})"


def _title(request: Request, names: Sequence[str] = ()) -> str:
    """Return the source and its kernels; before the compile, those that request or source name."""
    from kcache.nvrtc.inventory import title_of  # as above

    return title_of(request.source_name, names or request.kernels())
