"""Elsewhere: a compile in a new process, for one whose own NVRTC can't be used.

A child that is forked while another thread of its parent compiles inherits NVRTC's locks as they
are, held by a thread that the child does not have: its own first compile waits for ever (NVRTC
13.5, without kcache too; only `nvrtcCompileProgram` was seen to). There every compile runs in a new
interpreter, started by exec: same library, working directory and `sys.path`, 0.3 s slower.

It is one process for each compile: a new NVRTC has no state of an earlier failure, there is nothing
to end or to inherit by the next fork, and threads compile side by side.

Question and answer are a line of JSON with the sizes of the byte strings that follow it. Nothing
waits for the end of a pipe alone: a process forked by another thread meanwhile may hold it open.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from subprocess import PIPE, Popen, TimeoutExpired
from typing import TYPE_CHECKING, Any, NamedTuple

from kcache.errors import CompileError, CompileOptionError, CompilerNotFoundError
from kcache.nvrtc import compiler, library

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

__all__ = ["compile_program", "main", "supported_archs", "version"]

#: Isolated: no variable and no file in the working directory changes what is imported.
_FLAGS = ("-I", "-B", "-c")
_CODE = "import sys; sys.path[:] = sys.argv[1:]; from kcache.nvrtc.elsewhere import main; main()"
#: Precedes the answer: whatever runs at an interpreter's start may print, too.
_MARK = b"\0kcache\0"
#: Seconds between looks whether a process has ended whose pipes are still open.
_LOOK_EVERY = 1.0
_TRACE = "--fdevice-time-trace="
_LINKED = "/proc/self/fd/"
_ERRORS = {kind.__name__: kind for kind in (CompileError, CompileOptionError)}
_KILLED_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


class _Question(NamedTuple):
    """What a new process is asked; the source and the headers' texts follow it.

    Attributes:
        library, identity: which NVRTC to load, and what has to be in it; empty if unknown.
        compiles: whether to compile, else to tell versions only.
        parent: process id of who asks.
    """

    library: str
    identity: str
    compiles: bool
    parent: int
    flags: Sequence[str] = ()
    names: Sequence[str] = ()
    headers: Sequence[str] = ()
    source_name: str = ""


class _Answer(NamedTuple):
    """What a new process answers; the outputs that there are follow it.

    Attributes:
        unusable: why it could not ask NVRTC; else
        raised, message, log: name of the error's class, and what is in it; else
        log, seconds, lowered, has: see `Compiled`; which of the three outputs there are; or
        version, archs: where the question was not to compile.
    """

    unusable: str = ""
    raised: str = ""
    message: str = ""
    log: str = ""
    seconds: float = 0.0
    lowered: Mapping[str, str] | None = None
    has: Sequence[bool] = ()
    version: Sequence[int] = ()
    archs: Sequence[int] = ()


def version() -> tuple[int, int]:
    """Return what `compiler.version` returns in a new process."""
    answer, _ = _ask(_question(compiles=False), (), ())
    major, minor = answer.version
    return major, minor


def supported_archs() -> tuple[int, ...]:
    """Return what `compiler.supported_archs` returns in a new process."""
    answer, _ = _ask(_question(compiles=False), (), ())
    return tuple(answer.archs)


def compile_program(
    source: str,
    flags: Sequence[str],
    *,
    names: Sequence[str],
    headers: Mapping[str, str],
    source_name: str,
) -> compiler.Compiled:
    """Compile in a new process; returns and raises what `compiler.compile_program` does.

    Threads: each call has its own process. The process ends with the thread that waits for it.

    Raises:
        CompilerNotFoundError: there can be no such process, or it ended without an answer.
    """
    flags, descriptors = _followed(flags)
    question = _question(compiles=True)._replace(
        flags=flags, names=list(names), headers=list(headers), source_name=source_name
    )
    texts = [text.encode() for text in (source, *headers.values())]
    answer, outputs = _ask(question, texts, descriptors)
    if answer.raised:
        raise _ERRORS[answer.raised](answer.message, log=answer.log, source_name=source_name)
    left = iter(outputs)
    ptx, cubin, ltoir = (next(left) if one else None for one in answer.has)
    return compiler.Compiled(ptx, cubin, ltoir, answer.lowered or {}, answer.log, answer.seconds)


def _question(*, compiles: bool) -> _Question:
    found = library.find()
    path, identity = ("", "") if found is None else found
    return _Question(path, identity, compiles, os.getpid())


def _followed(flags: Sequence[str]) -> tuple[list[str], tuple[int, ...]]:
    """Return the flags, and the descriptors that they lead to: the trace's, see trace.py.

    A trace that would take the place of a standard stream is left out; then the compile has none.
    """
    kept: list[str] = []
    descriptors: list[int] = []
    for flag in flags:
        target = ""
        if flag.startswith(_TRACE):
            with suppress(OSError):
                target = os.readlink(flag.removeprefix(_TRACE) + ".json")
        number = target.removeprefix(_LINKED)
        if number != target and number.isdigit():
            if int(number) <= 2:
                continue
            descriptors.append(int(number))
        kept.append(flag)
    return kept, tuple(descriptors)


# -- the process that asks -----------------------------------------------------------------------


def _ask(
    question: _Question, texts: Sequence[bytes], descriptors: tuple[int, ...]
) -> tuple[_Answer, list[bytes]]:
    """Start a process, ask it, and see it end.

    Raises:
        CompilerNotFoundError: it can't be started, or has no answer.
    """
    asked = _pack(question, texts)
    command = [_interpreter(), *_FLAGS, _CODE, *(p for p in sys.path if isinstance(p, str))]  # pyright: ignore[reportUnnecessaryIsInstance]
    try:
        # A group of its own: an interrupt at the terminal is for this process to act on.
        process = Popen(
            command, stdin=PIPE, stdout=PIPE, stderr=PIPE, pass_fds=descriptors, process_group=0
        )
    except (OSError, ValueError) as error:
        raise _no_process(f"can't be started ({error})") from error
    with process:
        try:
            out, said = _talk(process, asked)
        finally:
            process.kill()  # does nothing to one that has ended
            process.wait()
    _, mark, told = out.partition(_MARK)
    try:
        about, outputs = _unpack(BytesIO(told))
    except ValueError:
        raise _no_process(_end(process.returncode, said, answered=bool(mark))) from None
    answer = _Answer(**about)
    if answer.unusable:
        raise _no_process(f"has none ({answer.unusable})")
    return answer, outputs


def _talk(process: Popen[bytes], asked: bytes) -> tuple[bytes, bytes]:
    """Return what the process wrote to its standard output and error until its end."""
    ended = False
    to_send: bytes | None = asked
    while True:
        try:
            return process.communicate(to_send, timeout=_LOOK_EVERY)
        except TimeoutExpired as late:
            if ended:  # all that it wrote has been read, and somebody else holds a pipe open
                return late.output or b"", late.stderr or b""
            ended = process.poll() is not None
            to_send = None  # it goes on where it was


def _interpreter() -> str:
    path = sys.executable or ""
    frozen = getattr(sys, "frozen", False)
    if frozen or not os.path.basename(path).lower().startswith("python"):
        raise _no_process(f"needs a Python interpreter, which sys.executable={path!r} is not")
    return path


def _end(status: int, said: bytes, *, answered: bool) -> str:
    """Describe how a process ended that gave no answer."""
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    last = said.decode(errors="replace").strip().rpartition("\n")[2]
    return f"{how}{' in its answer' if answered else ''}{': ' if last else ''}{last}"


def _no_process(reason: str) -> CompilerNotFoundError:
    return CompilerNotFoundError(
        "NVRTC can't be used in a process that was forked while another thread compiled, "
        f"and the new process that would compile for it {reason}"
    )


def _pack(about: _Question | _Answer, parts: Sequence[bytes]) -> bytes:
    line = json.dumps([about._asdict(), [len(part) for part in parts]])
    return b"".join((line.encode(), b"\n", *parts))


def _unpack(stream: BinaryIO) -> tuple[dict[str, Any], list[bytes]]:
    """Raises ValueError if the stream ends too early."""
    about, sizes = json.loads(stream.readline())
    parts = [stream.read(size) for size in sizes]
    if [len(part) for part in parts] != sizes:
        raise ValueError("cut off")
    return about, parts


# -- the process that answers --------------------------------------------------------------------


def main() -> None:
    """Answer the one question on standard input; what the new process runs."""
    out = os.dup(1)
    os.dup2(2, 1)  # the answer's pipe is nobody else's
    about, texts = _unpack(sys.stdin.buffer)
    question = _Question(**about)
    _end_with(question.parent)
    with open(out, "wb") as file:
        file.write(_MARK + _answer(question, texts))


def _answer(question: _Question, texts: list[bytes]) -> bytes:
    try:
        _load(question)
        return _compile(question, texts) if question.compiles else _about()
    except CompileError as error:
        raised = _Answer(raised=type(error).__name__, message=str(error), log=error.log)
        return _pack(raised, ())
    except Exception as error:  # whatever it is, the one who asks has to hear of it
        return _pack(_Answer(unusable=f"{type(error).__name__}: {error}"), ())


def _about() -> bytes:
    return _pack(_Answer(version=compiler.version(), archs=compiler.supported_archs()), ())


def _compile(question: _Question, texts: list[bytes]) -> bytes:
    source, *headers = (text.decode() for text in texts)
    done = compiler.compile_program(
        source,
        question.flags,
        names=question.names,
        headers=dict(zip(question.headers, headers, strict=True)),
        source_name=question.source_name,
    )
    outputs = (done.ptx, done.cubin, done.ltoir)
    has = [output is not None for output in outputs]
    answer = _Answer(log=done.log, seconds=done.seconds, lowered=done.lowered_names, has=has)
    return _pack(answer, [output for output in outputs if output is not None])


def _load(question: _Question) -> None:
    """Load the library that the question names.

    Raises:
        CompilerNotFoundError: it can't be loaded, or is another one by now, which would compile
            under the wrong key.
    """
    if question.library:
        import ctypes

        # The bindings take a library that is loaded already.
        with suppress(OSError):
            ctypes.CDLL(question.library, ctypes.RTLD_GLOBAL)
    compiler.version()
    loaded = library.loaded()
    if question.identity and (loaded is None or loaded.identity != question.identity):
        raise CompilerNotFoundError(f"{question.library} is not what it was")


def _end_with(parent: int) -> None:
    """Have this process killed when its parent's thread that started it ends."""
    import ctypes

    with suppress(OSError, AttributeError):  # another system, where it ends after its compile
        prctl: Callable[..., int] = ctypes.CDLL(None).prctl
        prctl(_KILLED_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
