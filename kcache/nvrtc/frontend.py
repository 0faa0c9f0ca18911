"""Frontend: compiles a request, and says what the result depends on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from kcache import config
from kcache.errors import CompileError
from kcache.nvrtc import compiler
from kcache.nvrtc.compiler import Compiled, Limits
from kcache.nvrtc.files import FileDigests
from kcache.nvrtc.headers import encode, is_directory, only_names
from kcache.nvrtc.manifest import EVERYWHERE, GOOD, ONLY, StoredHeaderSet
from kcache.nvrtc.relocation import alike, moved, shown
from kcache.nvrtc.request import Request
from kcache.nvrtc.search import HeaderSearch
from kcache.nvrtc.workers.messages import Trace
from kcache.util import log

if TYPE_CHECKING:
    from kcache.nvrtc.relocation import Outcome

#: How often a compile is repeated because its headers changed meanwhile. After that its result is
#: not cached.
MAX_REPEATS = 2
#: Answers that depend on the location and are part of every request's location.
_WORKING_DIRECTORY = "PWD"


class Verdict(NamedTuple):
    """The result of a proof.

    Attributes:
        good: whether the outcome is good in other places.
        header_set: the answers that the proof got, which hold now; None without headers, or if it
            is not good.
    """

    good: bool
    header_set: StoredHeaderSet | None = None


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

    def compile(
        self, request: Request, *, track: bool = True
    ) -> tuple[Compiled, StoredHeaderSet | None]:
        """Compile a request; with `track`, find out what the outcome depends on.

        Returns the outcome, whose `problem` says why it must not be cached, and the answers that
        decided it, which hold now; None for a self-contained request, or with a problem.

        Raises:
            CompileError: the compiler refused it; CompilerNotFoundError: there is none.
        """
        run: Compiled | None = None
        for _ in range(1 + MAX_REPEATS):
            asked_at = self._digests.clock()
            try:
                run = compiler.compile_request(request, self._limits)
            except CompileError:
                if run is None:
                    raise
                break  # it compiled a moment ago, so somebody is changing a header
            problem = run.problem or self._unusable(request, run)
            if not track:
                problem = "the cache is switched off"
            if problem or run.trace is None:
                return run._replace(problem=problem), None
            header_set = None
            if not request.self_contained:
                self._remember(request, request.search, run.trace, asked_at)
                header_set = _header_set(request, run)
            if header_set is None or header_set.holds(request, self._digests):
                if run.trace.may_ask_time and not self._is_timeless(request, run):
                    problem = "the outcome may depend on the time of the compile"
                    return run._replace(problem=problem), None
                return run, header_set
            log.debug("headers of %s changed during the compile: once more", request.source_name)
        assert run is not None
        return run._replace(problem="headers changed during the compile"), None

    def prove(
        self, request: Request, header_set: StoredHeaderSet | None, stored: Outcome
    ) -> Verdict | None:
        """Compile a request as if it was in another place, and compare the outcome.

        Returns None if there is no result, or if headers were changed meanwhile.

        Args:
            request: the request.
            header_set: the answers that an earlier compile of it got, which hold now; None for a
                self-contained request.
            stored: the outcome of that compile.
        """
        kept = () if header_set is None else tuple(header_set.sections().kept)
        elsewhere, directories = moved(request, kept)
        asked_at = self._digests.clock()
        try:
            run = compiler.compile_request(elsewhere, self._limits, moved=directories)
        except CompileError as error:
            if error.result is None:  # it crashed, or took too long
                return None
            run = None
        if run is not None and run.identity != request.compiler:  # somebody replaced it
            return None
        if header_set is not None and not header_set.holds(request, self._digests, proven=True):
            return None
        if run is None or run.trace is None or run.problem or not alike(stored, run):
            return Verdict(False)
        if header_set is None:
            return Verdict(True)
        self._remember(request, elsewhere.search, run.trace, asked_at)
        search, proof = request.search, (GOOD, header_set.origin)
        proven = _answers(elsewhere, run.trace, search, kept=kept, location=EVERYWHERE, proof=proof)
        same = proven.contents(search) == header_set.contents(search)
        if not same or not proven.holds(request, self._digests):
            return Verdict(False)
        return Verdict(True, proven)

    def _is_timeless(self, request: Request, run: Compiled) -> bool:
        """Tell whether a compile at another time gets the same answers and the same outcome."""
        try:
            again = compiler.compile_request(request, self._limits, moved={})
        except CompileError:
            return False
        if again.trace is None or again.problem or again.identity != run.identity:
            return False
        same = request.self_contained or (
            _header_set(request, again).raw == _header_set(request, run).raw
        )
        return same and alike(run, again)

    def _unusable(self, request: Request, run: Compiled) -> str:
        """Return why a question of the compiler forbids caching the outcome, or nothing."""
        trace = run.trace
        if trace is None or not request.self_contained:
            return ""
        if not only_names(trace, request.search) or any(_more_variables(trace)):
            return "it reads files or variables although nothing in it says so"
        return ""

    def _remember(self, request: Request, told: HeaderSearch, trace: Trace, asked_at: int) -> None:
        """Take over the digests of the files that the worker has read."""
        for path, answer in trace.files.items():
            if answer.opened:
                real = request.search.path(told.rooted(path))
                self._digests.remember(real, answer.stamp, answer.digest, asked_at)


def _header_set(request: Request, run: Compiled) -> StoredHeaderSet:
    """Return the answers that an outcome depends on, and where it is good."""
    assert run.trace is not None
    kept = shown(request, run.trace.files, run)
    location = ONLY * (kept is None) + request.location
    return _answers(request, run.trace, request.search, kept=kept or (), location=location)


def _answers(
    request: Request,
    trace: Trace,
    real: HeaderSearch,
    *,
    kept: Iterable[str],
    location: str,
    proof: Iterable[str] = (),
) -> StoredHeaderSet:
    """Return the answers in a trace; `real` has the working directory that `PWD` names."""
    asked = {
        path: answer
        for path, answer in trace.files.items()
        if answer.kind != "d" or not is_directory(path, real)
    }
    variables, trace = _more_variables(trace), trace._replace(files=asked)
    raw = encode(trace, request.search, variables, kept=kept, location=location, proof=proof)
    return StoredHeaderSet(raw)


def _more_variables(trace: Trace) -> Iterator[tuple[str, str | None]]:
    """Yield the variables that were asked for and are not in the key; see `config`."""
    for name, value in trace.variables.items():
        if name not in (*config.COMPILER_VARIABLES, _WORKING_DIRECTORY):
            yield name, value
