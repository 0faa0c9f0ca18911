"""Frontend: compiles a request, and says what the result depends on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kcache import config
from kcache.errors import CompileError
from kcache.nvrtc import compiler
from kcache.nvrtc.compiler import Compiled, Limits, Run
from kcache.nvrtc.files import FileDigests, file_clock_ns
from kcache.nvrtc.headers import SHOWN, HeaderSet, is_directory, only_names
from kcache.nvrtc.manifest import ONLY, StoredHeaderSet
from kcache.nvrtc.relocation import bound_of, called_of, moved
from kcache.nvrtc.request import Request
from kcache.nvrtc.workers.messages import Trace
from kcache.nvrtc.workers.texts import asks_clock
from kcache.util import log

__all__ = ["Frontend", "Outcome", "Proof"]

#: How often a compile is repeated because its headers changed meanwhile. After that its result is
#: not cached.
MAX_REPEATS = 2
#: Answers that depend on the location and are part of every request's location.
_WORKING_DIRECTORY = "PWD"


class Outcome(NamedTuple):
    """The outputs of a compile, and what they depend on.

    Attributes:
        compiled: the outputs.
        identity: of the library that compiled.
        header_set: the answers that decided them, which hold now; None for a self-contained
            request, or if the outcome must not be cached.
        uncacheable: why it must not be cached, or None.
    """

    compiled: Compiled
    identity: str
    header_set: StoredHeaderSet | None
    uncacheable: str | None


class Proof(NamedTuple):
    """The result of a compile with moved include directories.

    Attributes:
        compiled: the outputs, if it got the same answers as the compile before; otherwise None.
        conclusive: whether another attempt would give the same result.
    """

    compiled: Compiled | None
    conclusive: bool


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
                break  # it compiled a moment ago, so somebody is changing a header
            uncacheable = uncacheable or run.problem or self._unusable(request, run)
            if uncacheable or run.trace is None:
                return Outcome(run.compiled, run.identity, None, uncacheable)
            if request.self_contained:
                return Outcome(run.compiled, run.identity, None, None)
            self._remember(request, run.trace, asked_at)
            header_set = StoredHeaderSet.of(_header_set(request, run.trace, run.compiled))
            if header_set.holds(request.search, self._digests, request.location):
                return Outcome(run.compiled, run.identity, header_set, None)
            log.debug("headers of %s changed during the compile: once more", request.source_name)
        assert run is not None
        return Outcome(run.compiled, run.identity, None, "headers changed during the compile")

    def compile_elsewhere(self, request: Request, header_set: StoredHeaderSet) -> Proof:
        """Compile a request as if its include directories were elsewhere, to compare the outcome.

        Args:
            request: a request with headers.
            header_set: the answers that an earlier compile of it got, which hold now.
        """
        elsewhere = moved(request, source=not header_set.sections().called.startswith(SHOWN))
        try:
            run = compiler.compile_request(
                elsewhere.request, self._limits, moved=elsewhere.directories
            )
        except CompileError as error:
            if error.result is None:  # it crashed, or took too long
                return Proof(None, conclusive=False)
            run = None
        if run is not None and run.identity != request.compiler:  # somebody replaced it
            return Proof(None, conclusive=False)
        if run is not None and run.trace is not None and not run.problem:
            # LLVM asks for the real working directory, by `PWD`; see `Recorder.begin`.
            asked = {
                path: each
                for path, each in run.trace.files.items()
                if each.kind != "d" or not is_directory(path, request.search)
            }
            trace = run.trace._replace(files=asked)
            found = _header_set(elsewhere.request, trace, run.compiled)
            same = StoredHeaderSet.of(found).unbound().raw == header_set.unbound().raw
            if same and not found.bound.startswith(ONLY):
                return Proof(run.compiled, conclusive=True)
        # The outcome is different there, or the headers have changed since.
        held = header_set.holds(request.search, self._digests, request.location)
        return Proof(None, conclusive=held)

    def _unusable(self, request: Request, run: Run) -> str | None:
        """Return why a question of the compiler forbids caching the outcome, or None."""
        trace = run.trace
        if trace is None:
            return None
        for path, answer in trace.files.items():
            if asks_clock(answer.flags):
                return f"{path} uses the time of the compile"
        if request.self_contained:
            texts = (request.source_name, *request.headers)
            if not only_names(trace, request.search, texts) or any(_more_variables(trace)):
                return "it reads files or variables although nothing in it says so"
        return None

    def _remember(self, request: Request, trace: Trace, asked_at: int) -> None:
        """Take over the digests of the files that the worker has read."""
        for path, answer in trace.files.items():
            if answer.opened:
                absolute = request.search.path(request.search.rooted(path))
                self._digests.remember(absolute, answer.stamp, answer.digest, read_at=asked_at)


def _header_set(request: Request, trace: Trace, compiled: Compiled) -> HeaderSet:
    texts = (request.source_name, *request.headers)
    found = HeaderSet.of(trace, request.search, texts, _more_variables(trace))
    called = called_of(request, trace, compiled)
    return found._replace(called=called, bound=bound_of(request, trace, compiled))


def _more_variables(trace: Trace) -> Iterator[tuple[str, str | None]]:
    """Yield the variables that were asked for and are not in the key; see `config`."""
    for name, value in trace.variables.items():
        if name not in (*config.COMPILER_VARIABLES, _WORKING_DIRECTORY):
            yield name, value
