"""Compiler: compiles one request, and finds out what the result depends on.

Compiles run in worker processes (`workers/`), each known to be clean. This process compiles only if
no worker can: `KCACHE_WORKERS=0` is set, no interpreter can be started (an embedded or frozen
program), the working directory was removed, or the request names files of this process. It then
compiles one request at a time, and the result is not cached, because other code in the process may
have left state in the same library.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from typing import NamedTuple

from kcache.errors import CompileError, CompileOptionError, CompilerNotFoundError
from kcache.nvrtc import cuda_headers, library, places
from kcache.nvrtc.answers import Answers
from kcache.nvrtc.artifact import Artifact
from kcache.nvrtc.files import FileDigests, PathKind
from kcache.nvrtc.manifest import DependencySet
from kcache.nvrtc.request import NO_DIRECTORY, Request
from kcache.nvrtc.search import are_own_files
from kcache.nvrtc.workers.messages import Ask, Hello, Reply, Status, Trace
from kcache.nvrtc.workers.nvrtc import Nvrtc
from kcache.nvrtc.workers.pool import shared
from kcache.nvrtc.workers.process import CrashedError, NoWorkerError, TooLateError
from kcache.nvrtc.workers.slots import Slots
from kcache.util import log
from kcache.util.forks import after_fork

_INVALID_INPUT, _INVALID_OPTION = 3, 5
#: How often a compile is repeated because its headers changed. After that, its result is not
#: cached.
MAX_REPEATS = 2


class Compiled(NamedTuple):
    """One successful compile.

    Attributes:
        artifact: what the compile produced.
        identity: of the library that compiled.
        version: of the library, (major, minor).
        trace: what the library asked the operating system; None if that was not recorded.
        problem: why the result must not be cached; empty if it may be.
    """

    artifact: Artifact
    identity: str
    version: tuple[int, ...]
    trace: Trace | None
    problem: str


class Limits(NamedTuple):
    """The limits of compiles.

    Attributes:
        workers: how many workers may run at a time; 0 for none, None for one per usable core.
        timeout: seconds that a compile may take; None for no limit.
        slots: bound the compiles of all processes that share a directory; None for no bound.
    """

    workers: int | None = None
    timeout: float | None = None
    slots: Slots | None = None


def compile_tracked(
    request: Request, digests: FileDigests, limits: Limits
) -> tuple[Compiled, DependencySet | None]:
    """Compile a request, and find out what the result depends on.

    Returns the result, and the dependency set that leads to it, which holds now. The set is None
    for a self-contained request, or if the result has a problem. `digests` is the process's memory
    of file contents. Raises the errors of `compile_request`.
    """
    run: Compiled | None = None
    for _ in range(1 + MAX_REPEATS):
        asked_at = digests.clock()
        try:
            run = compile_request(request, limits)
        except CompileError:
            if run is None:
                raise
            break  # it compiled a moment ago, so a header is being changed
        artifact, trace = run.artifact, run.trace
        if run.problem or trace is None:
            return run, None
        answers = Answers.of(trace, request.search)
        problem = _unusable(request, trace, answers)
        if problem or request.self_contained:
            return run._replace(problem=problem), None
        for path, answer in trace.files.items():
            if answer.opened:
                real = request.search.absolute(path)
                digests.remember(real, answer.stamp, answer.digest, asked_at)
        names = "\n".join(artifact.lowered_names.values()).encode()
        outputs = (artifact.ptx, artifact.cubin, names)
        conditions = places.conditions(request, trace.found, outputs)
        answers = answers._replace(conditions=conditions, home=request.location)
        dependency_set = DependencySet(answers.encode())
        if dependency_set.holds(request, digests):
            return run, dependency_set
        log.debug("headers of %s changed during the compile: once more", request.source_name)
    assert run is not None
    return run._replace(problem="headers changed during the compile"), None


def _unusable(request: Request, trace: Trace, answers: Answers) -> str:
    """Return why a result must not be cached, or nothing."""
    if not request.has_usable_name:
        return f"NVRTC takes the source's name {request.source_name!r} for something else"
    if any(each.startswith(places.CLOCK) for each in trace.found):
        return "its LTOIR may show the date or the time of its compile"
    # Two names of texts might be one file.
    there = sum(each.kind == PathKind.FILE for each in trace.files.values())
    if request.self_contained and (there > 1 or not answers.has_names_only()):
        return "it reads files or variables although its text and its options show none"
    return ""


def compile_request(
    request: Request,
    limits: Limits = Limits(),  # noqa: B008  immutable
) -> Compiled:
    """Compile a request with a poisoned clock; then with the true one, if the result depends on it.

    Threads: safe; each compile has a worker of its own. Fork, crash: see `workers.pool`.

    Raises:
        CompilerNotFoundError: NVRTC is not installed.
        CompileOptionError: the compiler rejected an option or the architecture.
        CompileError: the compiler rejected the source, crashed, or exceeded the timeout; `.log` has
            its whole log.
    """
    caller = request.caller
    path = library.require().path if caller is None else caller.library
    if limits.workers == 0:
        return _compile_here(request, path, "workers are switched off")
    if request.search.directory == NO_DIRECTORY:  # no worker can enter it
        return _compile_here(request, path, "the working directory was removed")
    if _names_own_files(request):
        return _compile_here(request, path, "it names files of this process")
    pool = shared(limits.workers)
    try:
        ask = _ask(request)._replace(clock=request.key, slots=limits.slots)
        hello, reply = pool.compile(path, ask, limits.timeout)
        problem = ""
        if reply.status == Status.POISONED:
            problem = "it depends on the date or the time of its compile"
            hello, reply = pool.compile(path, ask._replace(clock=""), limits.timeout)
    except NoWorkerError as error:
        return _compile_here(request, path, f"no worker can be started: {error}")
    except (CrashedError, TooLateError) as error:
        name = request.source_name
        raise CompileError(f"{name}: {error}", source_name=name) from error
    compiled = _answered(request, hello, reply)
    return compiled._replace(problem=compiled.problem or problem)


def _names_own_files(request: Request) -> bool:
    """Return whether a request names files that are different or missing in a worker."""
    if request.caller is not None:  # checked by the code that made the request
        return False
    texts = (*request.texts, *request.search.prefixes, *request.options.flags())
    return any(are_own_files(text.encode("utf-8", "surrogateescape")) for text in texts)


def hello(path: str | None = None) -> Hello:
    """Return the description of the NVRTC at `path`, by default the one that compiles.

    Raises:
        CompilerNotFoundError: NVRTC is not installed.
    """
    path = path or library.require().path
    try:
        return shared().hello(path)
    except NoWorkerError:
        return _here(path).hello()


# -- inside ----------------------------------------------------------------------------------------


def _ask(request: Request) -> Ask:
    """Return the request to a worker."""
    environment = {} if request.caller is None else dict(request.caller.environment)
    return Ask(
        request.source,
        request.source_name,
        request.options.flags(),
        request.names,
        request.headers,
        request.search.directory,
        environment,
        sought=places.questions(request),
    )


def _answered(request: Request, hello: Hello, reply: Reply) -> Compiled:
    name = request.source_name
    if reply.status == Status.REJECTED:
        raise _failure(request, reply, hello.archs)
    if reply.status != Status.COMPILED:
        raise CompileError(f"{name}: the worker failed: {reply.text}", source_name=name)
    artifact, trace = reply.artifact, reply.trace
    problem = "" if trace is None else trace.unfollowed
    if not artifact.outputs:  # such as with --optix-ir alone
        problem = "it has neither PTX, CUBIN nor LTOIR"
    return Compiled(artifact, hello.identity, hello.version, trace, problem)


def _first_error(name: str, log: str) -> str:
    """Return the first error in a log, with the name that the caller used.

    NVRTC puts each name expression on a line of its own file `__nv_name_map`. The message of an
    error there names the expression instead of that file.
    """
    wrong = re.search(
        r"^__nv_name_map\(\d+\): error: (.*)\n *#pragma nv_mangled_name (.*)", log, re.M
    )
    first = next((line for line in log.splitlines() if "error" in line), log.partition("\n")[0])
    if wrong is not None and first.startswith("__nv_name_map"):
        return f"{name}: the name expression {wrong[2]!r} is wrong: {wrong[1]}"
    return first if not first or first.startswith(name) else f"{name}: {first}"


def _failure(request: Request, rejected: Reply, archs: tuple[int, ...]) -> CompileError:
    code, raw_log, log = rejected.code, rejected.artifact.raw_log, rejected.artifact.log
    name, arch = request.source_name, request.options.target
    if rejected.doing:
        message = f"{name}: could not {rejected.doing}: {rejected.text}"
        return CompileError(message, source_name=name)
    message = _first_error(name, log) or f"{name}: {rejected.text}"
    unknown_arch = "gpu-architecture" in log or "--nv_arch" in log
    if not unknown_arch and code not in (_INVALID_INPUT, _INVALID_OPTION):
        hint = cuda_headers.hint(log)
        return CompileError(
            message, log=log, source_name=name, result=code, raw_log=raw_log, hint=hint
        )
    if unknown_arch and arch is not None:
        known = ", ".join(map(str, archs))
        message = f"arch: this NVRTC expects sm_ or compute_ {known}, got {arch!r}"
    return CompileOptionError(message, log=log, source_name=name, result=code, raw_log=raw_log)


# -- in this process -------------------------------------------------------------------------------


class _Here:
    """The compiler in this process: one compile at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.libraries: dict[str, Nvrtc] = {}
        self.forked_inside = False
        after_fork(self)

    def after_fork(self) -> None:
        """Record whether the fork was during a compile: then the compiler's locks stay held."""
        self.forked_inside = self.forked_inside or self.lock.locked()
        self.lock = threading.Lock()


_inside = _Here()


def _here(path: str) -> Nvrtc:
    if _inside.forked_inside:
        raise CompilerNotFoundError(
            "NVRTC can't be used in a process that was forked while another thread compiled"
        )
    found = _inside.libraries.get(path)
    if found is None:
        try:
            found = _inside.libraries[path] = Nvrtc(path)
        except OSError as error:
            if os.strerror(errno.EMFILE) in str(error):  # dlopen(3) sets no errno
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path) from error
            message = f"the NVRTC library can't be loaded ({error}): {library.HOW_TO_INSTALL}"
            raise CompilerNotFoundError(message) from error
    return found


def _compile_here(request: Request, path: str, problem: str) -> Compiled:
    if request.caller is not None:  # its directory and environment are not those of this process
        name = request.source_name
        raise CompileError(f"{name}: only a worker can compile it: {problem}", source_name=name)
    with _inside.lock:
        nvrtc = _here(path)
        reply = nvrtc.compile(_ask(request))
        hello = nvrtc.hello()
    problem = f"it was compiled in this process ({problem})"
    return _answered(request, hello, reply)._replace(problem=problem)
