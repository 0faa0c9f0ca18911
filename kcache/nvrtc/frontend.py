"""The frontend: compiles a request, and says what its outcome depends on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from kcache import config
from kcache.errors import CompileError
from kcache.nvrtc import compiler
from kcache.nvrtc.compiler import Compiled, Limits, Run
from kcache.nvrtc.files import FileDigests, file_clock_ns
from kcache.nvrtc.headers import FREE, HeaderSet, only_names
from kcache.nvrtc.manifest import NAMED, ONLY, Variant
from kcache.nvrtc.request import Request
from kcache.nvrtc.search import SPELLING
from kcache.nvrtc.workers.messages import Record
from kcache.nvrtc.workers.texts import NAMES, PATHS, asks_clock, flags_of
from kcache.util import log

__all__ = ["Frontend", "Outcome"]

#: How often a compile is repeated whose headers changed meanwhile, before it is left uncached.
MAX_REPEATS = 2
#: Location-dependent answers that are part of every request's location.
_WORKING_DIRECTORY = "PWD"


class Outcome(NamedTuple):
    """What a compile made, and what that depends on.

    Attributes:
        compiled: the outputs.
        identity: of the library that compiled.
        variant: the answers that decided them, which hold now; None for a self-contained request,
            or where the outcome must not be cached.
        uncacheable: why it must not be cached, or None.
    """

    compiled: Compiled
    identity: str
    variant: Variant | None
    uncacheable: str | None


class Frontend:
    """Compiles requests and keeps what their outcomes depend on.

    Threads: safe to share.

    Args:
        digests: the process's memory of file contents.
        limits: what a compile may take.
    """

    def __init__(self, digests: FileDigests, limits: Limits) -> None:
        self._digests = digests
        self._limits = limits

    def compile(self, request: Request, *, track: bool = True) -> Outcome:
        """Compile a request; with `track`, find out what the outcome depends on.

        Raises:
            CompileError: the compiler refused it; CompilerNotFoundError: there is none.
        """
        uncacheable = request.uncacheable() if track else "the cache is switched off"
        run: Run | None = None
        for _ in range(1 + MAX_REPEATS):
            asked_at = file_clock_ns()
            try:
                run = compiler.compile_request(request, self._limits)
            except CompileError:
                if run is None:
                    raise
                break  # it compiled a moment ago, so a header is being changed
            uncacheable = uncacheable or run.problem or self._unusable(request, run)
            if uncacheable or run.record is None:
                return Outcome(run.compiled, run.identity, None, uncacheable)
            if request.self_contained:
                return Outcome(run.compiled, run.identity, None, None)
            self._remember(request, run.record, asked_at)
            variant = Variant.of(_header_set(request, run.record, run.compiled))
            if variant.holds(request.search, self._digests, request.location):
                return Outcome(run.compiled, run.identity, variant, None)
            log.debug("headers of %s changed during the compile: once more", request.source_name)
        assert run is not None
        return Outcome(run.compiled, run.identity, None, "headers changed during the compile")

    def _unusable(self, request: Request, run: Run) -> str | None:
        """Return why what was asked forbids to cache the outcome, or None."""
        record = run.record
        if record is None:
            return None
        for path, answer in record.files.items():
            if asks_clock(answer.flags):
                return f"{path} uses the time of the compile"
        if request.self_contained:
            texts = (request.source_name, *request.headers)
            if not only_names(record, request.search, texts) or any(_more_variables(record)):
                return "it reads files or variables although nothing in it says so"
        return None

    def _remember(self, request: Request, record: Record, asked_at: int) -> None:
        """Take over the digests of the files that the worker has read."""
        for path, answer in record.files.items():
            if answer.opened:
                absolute = request.search.path(request.search.place(path))
                self._digests.remember(absolute, answer.stamp, answer.digest, read_at=asked_at)


def _header_set(request: Request, record: Record, compiled: Compiled) -> HeaderSet:
    texts = (request.source_name, *request.headers)
    found = HeaderSet.of(record, request.search, texts, _more_variables(record))
    return found._replace(bound=_bound(request, record, compiled))


def _more_variables(record: Record) -> Iterator[tuple[str, str | None]]:
    """Yield the variables that were asked for and are not in the key; see `config`."""
    for name, value in record.variables.items():
        if name not in (*config.COMPILER_VARIABLES, _WORKING_DIRECTORY):
            yield name, value


def _bound(request: Request, record: Record, compiled: Compiled) -> str:
    """Return where an outcome is good; see `HeaderSet.bound`."""
    if request.shows_paths:  # the key has them
        return FREE
    spelled, absolute = _paths(request, record)
    if _holds(compiled, absolute):
        return ONLY + request.location
    flags = 0
    for answer in record.files.values():
        flags |= answer.flags
    marks = request.search.marks()
    texts = (request.source, *request.headers.values(), *request.options.extra.without_paths)
    for text in (*texts, *request.defines):
        flags |= flags_of(text.encode()) | (PATHS if any(m in text for m in marks) else 0)
    bound = request.location if flags & PATHS else request.location[:SPELLING]
    if _holds(compiled, spelled):
        return ONLY + bound
    if flags & NAMES:
        return bound + NAMED
    return bound if flags & PATHS else FREE


def _paths(request: Request, record: Record) -> tuple[list[str], list[str]]:
    """Return the paths that tell where the compile was made, as the compiler may write them.

    First the include directories as they were spelled, then what names the working directory.
    """
    search = request.search
    used = {search.place(path).root for path in record.files}
    spelled = {prefix for root, prefix in enumerate(search.prefixes) if prefix and root in used}
    absolute = {root for n, root in enumerate(search.roots) if n in used} | {search.base}
    return sorted(spelled), sorted(absolute - spelled)


def _holds(compiled: Compiled, paths: list[str]) -> bool:
    """Tell whether one of the paths is in an output or in the log.

    PTX writes strings as lists of decimal bytes, `.b8 name[3] = {47, 97, 0}`. A path of one letter
    and a slash is found where it is none: that costs a compile elsewhere, and nothing else.
    """
    outputs = [output for output in (compiled.cubin, compiled.ltoir, compiled.ptx) if output]
    outputs.append(compiled.log.encode())
    for path in paths:
        raw = os.fsencode(path)
        decimal = ", ".join(map(str, raw)).encode()
        if any(raw in output or decimal in output for output in outputs):
            return True
    return False
