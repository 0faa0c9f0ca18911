"""Compiler: compiles one request, and finds out what the result depends on.

Compiles run in worker processes (`workers/`), which compile each request as a new process would.
This process compiles a request itself only if no worker can, for one of these reasons:
`KCACHE_WORKERS=0` is set, no interpreter can be started (in an embedded or frozen program), the
working directory was removed, or the request names files that belong to this process. It then
compiles one request at a time, and the results are not cached, because other code in this process
may have changed the state of the NVRTC library.
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
#: How many times a compile is repeated because its headers changed meanwhile. If they also change
#: during the last repetition, the result is not cached.
MAX_REPEATS = 2


class Compiled(NamedTuple):
    """One successful compile.

    Attributes:
        artifact: what the compile produced.
        identity: the identity of the compiler that ran; see the module `library`.
        version: the version of that compiler, (major, minor).
        trace: what the compiler asked the operating system; None if that was not recorded.
        problem: why the result must not be cached; empty if it may be cached.
    """

    artifact: Artifact
    identity: str
    version: tuple[int, ...]
    trace: Trace | None
    problem: str


class Limits(NamedTuple):
    """The limits of compiles.

    Attributes:
        workers: how many workers this process may run at a time; with 0, it compiles without
            workers. None leaves the limit as it is, by default one worker for each usable core.
        timeout: how many seconds a compile may take; None for no limit.
        slots: these limit the compiles of all processes that share a directory; None for no limit.
    """

    workers: int | None = None
    timeout: float | None = None
    slots: Slots | None = None


def compile_tracked(
    request: Request, digests: FileDigests, limits: Limits
) -> tuple[Compiled, DependencySet | None]:
    """Compile `request`, and return the result with its dependency set.

    If headers change during the compile, the compile is repeated, at most `MAX_REPEATS` times. The
    dependency set matches the files on disk. It is None if the request is self-contained, or if the
    result must not be cached (see `Compiled.problem`). The digests of the headers that were read
    are added to `digests`. Raises the same errors as `compile_request`.
    """
    run: Compiled | None = None
    for _ in range(1 + MAX_REPEATS):
        asked_at = digests.clock()
        try:
            run = compile_request(request, limits)
        except CompileError:
            if run is None:
                raise
            break  # the compile before this one succeeded, so a header is being changed
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
        log.debug("headers of %s changed during the compile; compiling again", request.source_name)
    assert run is not None
    return run._replace(problem="headers changed during the compile"), None


def _unusable(request: Request, trace: Trace, answers: Answers) -> str:
    """Return why the result of a compile must not be cached, or an empty text if it may be."""
    if not request.has_usable_name:
        return f"NVRTC does not treat the source's name {request.source_name!r} as a file name"
    if any(each.startswith(places.CLOCK) for each in trace.found):
        return "its LTOIR may show the date or the time of its compile"
    # If files exist at the names of two in-memory texts, both might be the same file.
    there = sum(each.kind == PathKind.FILE for each in trace.files.values())
    if request.self_contained and (there > 1 or not answers.has_names_only()):
        return "the compiler looks for files or variables, although the request names none"
    return ""


def compile_request(
    request: Request,
    limits: Limits = Limits(),  # noqa: B008  immutable
) -> Compiled:
    """Compile `request` in a worker, or in this process if no worker can compile it.

    The worker first compiles with a poisoned clock, which shows whether the result depends on the
    date or the time (see `workers.recorder`). If it does, the worker compiles again with the true
    clock, and the result must not be cached.

    Threads: May be called from several threads at the same time, because each compile has a worker
    of its own. Fork, crash: See `workers.pool.WorkerPool`.

    Raises:
        CompilerNotFoundError: NVRTC is not installed or can't be loaded.
        CompileOptionError: the compiler rejected an option or the architecture.
        CompileError: the compiler rejected the source, crashed or exceeded the timeout. The error's
            attribute `log` is the compiler's whole log.
    """
    caller = request.caller
    path = library.require().path if caller is None else caller.library
    if limits.workers == 0:
        return _compile_here(request, path, "workers are switched off")
    if request.search.directory == NO_DIRECTORY:  # no worker can enter it
        return _compile_here(request, path, "the working directory was removed")
    if _names_own_files(request):
        return _compile_here(request, path, "the request names files that belong to this process")
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
    """Return whether `request` names files that only this process has, such as `/proc/self/fd/3`.

    In a worker, such a path leads to another file, or to none.
    """
    if request.caller is not None:  # the code that made the request has checked this
        return False
    texts = (*request.texts, *request.search.prefixes, *request.options.flags())
    return any(are_own_files(text.encode("utf-8", "surrogateescape")) for text in texts)


def hello(path: str | None = None) -> Hello:
    """Return the identity, version and architectures of the NVRTC library at `path`.

    By default, `path` is the library that compiles.

    Raises:
        CompilerNotFoundError: NVRTC is not installed or can't be loaded.
    """
    path = path or library.require().path
    try:
        return shared().hello(path)
    except NoWorkerError:
        return _here(path).hello()


# -- inside ----------------------------------------------------------------------------------------


def _ask(request: Request) -> Ask:
    """Return the message that asks a worker to compile `request`."""
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
        problem = "the compiler made neither PTX, CUBIN nor LTOIR"
    return Compiled(artifact, hello.identity, hello.version, trace, problem)


def _first_error(name: str, log: str) -> str:
    """Return the first error message in `log`, beginning with `name`, the name of the source.

    NVRTC compiles the name expressions as lines of a file `__nv_name_map`, which the caller does
    not know. For an error in that file, the returned message quotes the name expression.
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
        message = f"{name}: NVRTC could not {rejected.doing}: {rejected.text}"
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
        expected = f"an architecture of this NVRTC (sm_N or compute_N for N in {known})"
        message = f"arch: expected {expected}, got {arch!r}"
    return CompileOptionError(message, log=log, source_name=name, result=code, raw_log=raw_log)


# -- in this process -------------------------------------------------------------------------------


class _Here:
    """The NVRTC libraries that this process has loaded, and a lock that each compile holds."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.libraries: dict[str, Nvrtc] = {}
        self.forked_inside = False
        after_fork(self)

    def after_fork(self) -> None:
        """Replace the lock in a forked child, and record whether a compile was running at the fork.

        If so, the child can't compile, because the compiler's own locks are never released there.
        """
        self.forked_inside = self.forked_inside or self.lock.locked()
        self.lock = threading.Lock()


_inside = _Here()


def _here(path: str) -> Nvrtc:
    if _inside.forked_inside:
        raise CompilerNotFoundError(
            "NVRTC can't be used in a process that was forked while another thread was compiling"
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
        message = f"{name}: only a worker can compile it, but {problem}"
        raise CompileError(message, source_name=name)
    with _inside.lock:
        nvrtc = _here(path)
        reply = nvrtc.compile(_ask(request))
        hello = nvrtc.hello()
    problem = f"it was compiled in this process ({problem})"
    return _answered(request, hello, reply)._replace(problem=problem)
