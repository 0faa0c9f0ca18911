"""Compile: runs the compiler once for a request that missed, logs it and counts it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kcache.engine.journal import UNCACHEABLE
from kcache.util import log

if TYPE_CHECKING:
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
        if self._writes and log.debugging():
            self._log_why(request)
        outcome = self._front().compile(request, track=self._writes)
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

    def _log_why(self, request: Request) -> None:
        """Log why a request is compiled, as far as that can be found out quickly."""
        from kcache.admin.explain import explain  # few programs log this

        finder = self._finder
        aside = () if finder.reads else (("recache", "the cache is not looked into"),)
        digests = finder.headers.digests
        try:
            told = explain(finder.engine, request, set_aside=aside, compare=False, digests=digests)
        except Exception as error:  # a failed log line must not cost a kernel
            log.debug(
                "the reason for which %s is compiled is unknown: %s", request.source_name, error
            )
        else:
            log.debug("%s is compiled: %s", request.source_name, told.clauses)
