"""Frontend: compiles a request, and finds out what the result depends on."""

from __future__ import annotations

from kcache.errors import CompileError
from kcache.nvrtc import compiler, places
from kcache.nvrtc.answers import Answers
from kcache.nvrtc.compiler import Compiled, Limits
from kcache.nvrtc.files import FileDigests, PathKind
from kcache.nvrtc.manifest import DependencySet
from kcache.nvrtc.request import Request
from kcache.nvrtc.workers.messages import Trace
from kcache.util import log

#: How often a compile is repeated because its headers changed. After that its result is
#: not cached.
MAX_REPEATS = 2


def compile_tracked(
    request: Request, digests: FileDigests, limits: Limits, *, track: bool = True
) -> tuple[Compiled, DependencySet | None]:
    """Compile a request; with `track`, find out what the result depends on.

    Returns the result, whose `problem` is why it must not be cached, and the answers that decided
    it, which hold now; None for a self-contained request, or with a problem.

    Args:
        request: what to compile.
        digests: the process's memory of file contents.
        limits: what the compile may take.
        track: whether the result may be cached.

    Raises:
        CompileError: the compiler rejected it; CompilerNotFoundError: there is none.
    """
    run: Compiled | None = None
    for _ in range(1 + MAX_REPEATS):
        asked_at = digests.clock()
        try:
            run = compiler.compile_request(request, limits)
        except CompileError:
            if run is None:
                raise
            break  # it compiled a moment ago, so a header is being changed
        answers = Answers.of(run.trace, request.search) if run.trace else None
        problem = run.problem or _unusable(request, run.trace, answers)
        if not track:
            problem = "the cache is switched off"
        if problem or run.trace is None or answers is None:
            return run._replace(problem=problem), None
        if request.self_contained:
            return run, None
        for path, answer in run.trace.files.items():
            if answer.opened:
                real = request.search.absolute(path)
                digests.remember(real, answer.stamp, answer.digest, asked_at)
        dependency_set = DependencySet(_completed(answers, request, run).encode())
        if dependency_set.holds(request, digests):
            return run, dependency_set
        log.debug("headers of %s changed during the compile: once more", request.source_name)
    assert run is not None
    return run._replace(problem="headers changed during the compile"), None


def _unusable(request: Request, trace: Trace | None, answers: Answers | None) -> str:
    """Return why a result must not be cached, or nothing."""
    if not request.has_usable_name:
        return f"NVRTC takes the source's name {request.source_name!r} for something else"
    if trace is None or answers is None:
        return ""
    if any(each.startswith(places.CLOCK) for each in trace.found):
        return "its LTOIR may show the date or the time of its compile"
    # Two names of texts might be one file.
    there = sum(each.kind == PathKind.FILE for each in trace.files.values())
    if request.self_contained and (there > 1 or not answers.has_names_only()):
        return "it reads files or variables although its text and its options show none"
    return ""


def _completed(answers: Answers, request: Request, run: Compiled) -> Answers:
    """Return the answers with where the result may be used."""
    artifact, trace = run.artifact, run.trace
    assert trace is not None
    names = "\n".join(artifact.lowered_names.values()).encode()
    outputs = (artifact.ptx, artifact.cubin, names)
    conditions = places.conditions(request, trace.found, outputs)
    return answers._replace(conditions=conditions, home=request.location)
