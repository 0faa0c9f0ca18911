"""The frontend: compiles a request, and finds out what its outcome depends on."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from kcache.errors import CompileError
from kcache.nvrtc import compiler
from kcache.nvrtc.compiler import Compiled
from kcache.nvrtc.dependencies import Tracker
from kcache.nvrtc.files import FileDigests, next_tick
from kcache.nvrtc.headers import HeaderSet, UncacheableError
from kcache.nvrtc.precompiled import PrecompiledHeaders
from kcache.nvrtc.request import TRIGRAPHS, Request
from kcache.nvrtc.trace import Trace, Tracer
from kcache.util import log

__all__ = ["Frontend", "Outcome"]

#: How often a compile is repeated whose headers changed meanwhile, before it is left uncached.
MAX_REPEATS = 2
#: NVRTC lists headers in its trace from this version on (12.6 to 12.9 list none).
TRACING = (13, 0)


class Outcome(NamedTuple):
    """What a compile made, and what that depends on.

    Attributes:
        compiled: the outputs.
        headers: the headers that decided them; None for a self-contained request, or where the
            outcome must not be cached.
        uncacheable: why it must not be cached, or None.
    """

    compiled: Compiled
    headers: HeaderSet | None
    uncacheable: str | None


class Frontend:
    """Compiles requests and tracks the headers that they read.

    Threads: safe to share. Never aborts the process because of tracing: where the compiler's
    trace can't be had, the source's text is followed instead.

    Args:
        directory: private directory for the trace's links, or None for a temporary one.
        digests: the process's memory of file contents.
    """

    def __init__(self, directory: str | None, digests: FileDigests) -> None:
        self._tracer = Tracer(directory)
        # No method: in a circle of references, files would stay until it is found.
        self._tracker = partial(_tracker, digests)
        self._precompiled = PrecompiledHeaders(digests, self._tracker)

    def compile(self, request: Request, *, track: bool = True) -> Outcome:
        """Compile a request; with `track`, find out what the outcome depends on.

        Raises:
            CompileError: the compiler refused it; CompilerNotFoundError: there is none.
        """
        if not track:
            return Outcome(self._run(request), None, "the cache is switched off")
        uncacheable = request.uncacheable()
        if uncacheable is not None:
            return Outcome(self._run(request), None, uncacheable)
        if request.self_contained:
            return Outcome(self._run(request), None, None)
        return self._compile_tracked(request)

    def _compile_tracked(self, request: Request) -> Outcome:
        """Compile until what the headers hold is known to be what the compiler read."""
        compiled: Compiled | None = None
        before: object = None
        for _ in range(1 + MAX_REPEATS):
            started = next_tick()
            try:
                told = self._precompiled.compile(request)
                compiled, trace = told or self._run_traced(request)
            except CompileError:
                if compiled is None:
                    raise
                break  # it compiled a moment ago, so a header is being changed
            tracker = self._tracker(request)
            try:
                headers = tracker.from_scan() if trace is None else tracker.from_trace(trace)
            except UncacheableError as error:
                allowed = request.extra_key and error.covered_by_extra_key
                if not allowed:
                    return Outcome(compiled, None, str(error))
                headers = tracker.known()
            headers = self._with_paths(request, headers, compiled, tracker)
            if not tracker.changed_since(started):
                if trace is not None:
                    self._precompiled.make(request, trace, started)
                return Outcome(compiled, headers, None)
            # Times may lie in the future; but what did not change from one compile to the next...
            seen = (headers, tracker.stamps())
            if seen == before:
                return Outcome(compiled, headers, None)
            log.debug("headers of %s changed during the compile: once more", request.source_name)
            before = seen
        assert compiled is not None
        return Outcome(compiled, None, "headers changed during the compile")

    def _run(self, request: Request, *flags: str) -> Compiled:
        return compiler.compile_program(
            request.source,
            (*flags, *request.options.flags()),
            names=request.names,
            headers=request.headers,
            source_name=request.source_name,
        )

    def _run_traced(self, request: Request) -> tuple[Compiled, Trace | None]:
        if compiler.version() < TRACING:
            return self._run(request), None
        following = self._tracer.begin()
        if following is None:
            return self._run(request), None
        try:
            compiled = self._run(request, following.flag)
            return compiled, following.read()
        except BaseException:
            following.failed = True
            # NVRTC goes on tracing after a failure: the next compile without the option, anybody's,
            # would write `.json` into the working directory, or abort where it can't. A compile
            # of nothing takes that trace, into our file.
            with suppress(CompileError):
                compiler.compile_program("", (following.flag,), source_name="nothing.cu")
            raise
        finally:
            following.end()

    def _with_paths(
        self, request: Request, headers: HeaderSet, compiled: Compiled, tracker: Tracker
    ) -> HeaderSet:
        """Return the set, marked if the outcome holds the paths of headers."""
        roots = {place.root for place in headers.files if place.root > 0}
        prefixes = [request.search.prefixes[root] for root in roots]
        if tracker.names_paths(opaque=compiled.ltoir is not None) or _holds(compiled, prefixes):
            return headers._replace(paths=True)
        return headers


def _tracker(digests: FileDigests, request: Request) -> Tracker:
    return Tracker(
        request.source,
        request.search,
        pre_includes=request.extra.pre_includes,
        defines=request.defines,
        in_memory=request.headers,
        trigraphs=TRIGRAPHS if request.reads_trigraphs() else (),
        digests=digests,
    )


def _holds(compiled: Compiled, prefixes: list[str]) -> bool:
    """Tell whether PTX or CUBIN contain one of the prefixes.

    PTX writes strings as lists of decimal bytes, `.b8 name[3] = {47, 97, 0}`.
    """
    for prefix in prefixes:
        raw = os.fsencode(prefix)
        decimal = ", ".join(map(str, raw)).encode()
        if raw in (compiled.cubin or b"") or raw in (ptx := compiled.ptx or b"") or decimal in ptx:
            return True
    return False
