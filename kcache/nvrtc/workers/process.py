"""WorkerProcess: one worker, as the program that started it sees it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from kcache.environment import without_dropin
from kcache.errors import KcacheError
from kcache.nvrtc.workers.messages import Ask, Hello, Reply
from kcache.util.open_file import OpenFile
from kcache.util.wire import WireError, receive, send

if TYPE_CHECKING:
    from collections.abc import Mapping
    from subprocess import Popen
    from typing import IO

__all__ = [
    "CrashedError",
    "NoWorkerError",
    "TooLateError",
    "WorkerProcess",
    "interpreter",
    "standing",
]

#: Isolated and without `site`. So no variable, no file in the working directory and no `.pth` file
#: changes the imports, and nothing unneeded is imported.
_FLAGS = ("-I", "-S", "-B", "-c")
_CODE = (
    "import sys; path, parent, *sys.path[:] = sys.argv[1:]; sys.argv[1:] = path, parent; "
    "from kcache.nvrtc.workers.worker import main; main()"
)
#: How many bytes of a crashed worker's output an error quotes.
_QUOTED = 2048


class NoWorkerError(KcacheError):
    """No worker can be started here; the message says why. Never reaches a caller."""


class CrashedError(KcacheError):
    """A worker ended during a compile; the message says how."""


class TooLateError(KcacheError):
    """A compile exceeded its time limit."""


def interpreter() -> str:
    """Return the interpreter that workers run in.

    Raises:
        NoWorkerError: this program has none (it is embedded or frozen).
    """
    path = sys.executable or ""
    frozen = getattr(sys, "frozen", False)
    if frozen or not os.path.basename(path).lower().startswith(("python", "pypy")):
        raise NoWorkerError(f"a Python interpreter is needed; sys.executable is {path!r}")
    return path


def standing() -> tuple[object, ...]:
    """Return the user and the file tree of a process that is started now.

    A worker that was started before the program became another user, or changed its root, would
    read files that the program may not read, or other files.
    """
    if sys.platform == "win32":
        return ()
    root = os.stat("/")
    try:
        mounts = os.readlink("/proc/self/ns/mnt")
    except OSError:
        mounts = ""
    users = (os.geteuid(), os.getegid(), *sorted(os.getgroups()))
    return (*users, root.st_dev, root.st_ino, mounts)


class WorkerProcess:
    """One worker. Used by one thread at a time; `stop` may be called by any.

    Processes: it ends with this one, also after SIGKILL. Fork: a child calls `forget` and leaves
    the worker to its parent. It inherits no descriptor but its three.

    Args:
        library: path of the compiler.
        environment: variables of this process now.

    Raises:
        NoWorkerError: it can't be started, or can't load the library.
    """

    def __init__(self, library: str, environment: Mapping[str, str]) -> None:
        self.library = library
        self.environment = environment
        #: The number of compiles so far; the largest memory in bytes; the family of its precompiled
        #: headers; the last working directory that it was told.
        self.compiles = 0
        self.peak = 0
        self.family: object = None
        self.directory: str | None = None
        self.standing = standing()
        self._pipes: list[OpenFile] = []
        self._said: OpenFile | None = OpenFile(_said_file())
        self._process = self._start(library, self._said)
        try:
            self._pipes = [_taken(self._process.stdin), _taken(self._process.stdout)]
            self.hello = Hello.unpack(receive(self._pipes[1].fd))
        except (WireError, OSError) as error:
            self.end()
            raise NoWorkerError(f"a worker {self._how()}: {self._last_words()}") from error
        except BaseException:
            self.end()
            raise
        if self.hello.error:
            self.end()
            raise NoWorkerError(self.hello.error)

    def _start(self, library: str, said: OpenFile) -> Popen[bytes]:
        from subprocess import PIPE, Popen  # a hit never starts a process

        paths = (path for path in sys.path if isinstance(path, str))  # pyright: ignore[reportUnnecessaryIsInstance]
        folders = filter(None, map(_absolute, paths))
        command = [interpreter(), *_FLAGS, _CODE, library, str(os.getpid()), *folders]
        try:
            return Popen(
                command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=said.fd,
                bufsize=0,
                env=without_dropin(self.environment),
                # A group of its own: the program decides what an interrupt at the terminal does.
                process_group=None if sys.platform == "win32" else 0,
            )
        except (OSError, ValueError) as error:
            self._last_words()
            raise NoWorkerError(f"a worker can't be started: {error}") from error

    def ask(self, ask: Ask, timeout: float | None) -> Reply:
        """Compile a request.

        Raises:
            CrashedError: the worker has ended; TooLateError: it took longer than `timeout` seconds
                and was ended.
        """
        if not self.is_whole():
            self.end()
            raise CrashedError("the program has closed the descriptors of the worker")
        late = threading.Event()
        timer = None
        if timeout is not None:
            timer = threading.Timer(timeout, self._stop_late, (late,))
            timer.daemon = True
            with suppress(RuntimeError):  # the interpreter is ending, so the limit can't be kept
                timer.start()
        try:
            send(self._pipes[0].fd, ask.pack(), _write)
            reply = Reply.unpack(receive(self._pipes[1].fd))
        except (WireError, OSError) as error:
            self.end()
            words = self._last_words()
            if late.is_set():
                raise TooLateError(f"the compile took longer than {timeout:g} seconds") from error
            raise CrashedError(f"{self._how()}{_clause(words)}") from error
        except BaseException:  # an interrupt: nobody waits for its work any more
            self.end()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        self.compiles += 1
        self.peak = reply.peak
        return reply

    def _stop_late(self, late: threading.Event) -> None:
        late.set()
        self.stop()

    @property
    def ended(self) -> bool:
        """Whether the worker was ended."""
        return self._process.returncode is not None

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    def is_whole(self) -> bool:
        """Tell whether the pipes still lead to the worker.

        They do not if the program has closed descriptors that are not its own, as programs do that
        become daemons. Files of the program may now have these numbers.
        """
        return bool(self._pipes) and all(pipe.is_open() for pipe in self._pipes)

    def stop(self) -> None:
        """Make the worker end, whatever it is doing; the thread that uses it notices."""
        with suppress(OSError):
            self._process.kill()

    def end(self) -> None:
        """End the worker, whatever it is doing. Idempotent; for the thread that uses it."""
        process = self._process
        # It ends by itself when its input ends: a program that has changed its user may not send it
        # a signal.
        self._close()
        if process.returncode is None:
            with suppress(OSError):
                process.kill()
            process.wait()

    def forget(self) -> None:
        """Close this side's pipes in a forked child; the parent keeps the worker."""
        self._process.returncode = 0  # not this process's child: nothing to wait for
        self._close()

    def _close(self) -> None:
        self._pipes = []

    def _how(self) -> str:
        status = self._process.returncode
        if status is None or status >= 0:
            return f"ended with status {status}"
        with suppress(ValueError):
            return f"was killed by signal {-status} ({signal.Signals(-status).name})"
        return f"was killed by signal {-status}"

    def _last_words(self) -> str:
        """Return the end of what the worker wrote to its standard error; closes that file."""
        said, self._said = self._said, None
        if said is None or not said.is_open():
            return ""
        try:
            size = os.fstat(said.fd).st_size
            os.lseek(said.fd, max(0, size - _QUOTED), os.SEEK_SET)
            return os.read(said.fd, _QUOTED).decode(errors="replace").strip()
        except OSError:
            return ""


def _write(fd: int, data: memoryview) -> int:
    """Write to a worker; raises BrokenPipeError if it has ended.

    Python ignores SIGPIPE. A program may have switched that off, as many command lines do, and an
    embedded interpreter may never have switched it on. Then a worker that ended while it was idle
    would take the program along. So the signal is blocked meanwhile, and the one of this write is
    taken.
    """
    if sys.platform == "win32":
        return os.write(fd, data)
    pipe = {signal.SIGPIPE}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, pipe)
        return os.write(fd, data)
    except BrokenPipeError:
        if signal.SIGPIPE not in before and signal.SIGPIPE in signal.sigpending():
            signal.sigwait(pipe)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _taken(stream: IO[bytes] | None) -> OpenFile:
    """Return a descriptor instead of a stream, which would later close any file with its number.

    Raises:
        OSError: no descriptor is left.
    """
    assert stream is not None
    with stream:
        return OpenFile(os.dup(stream.fileno()))


def _said_file() -> int:
    """Return a descriptor of a file without a name, for a worker's standard error.

    If no such file can be made, the worker's messages are lost.

    Raises:
        NoWorkerError: no descriptor is left.
    """
    if hasattr(os, "memfd_create"):
        with suppress(OSError):  # a sandbox may forbid it
            return os.memfd_create("kcache-worker", os.MFD_CLOEXEC)
    import tempfile

    try:
        with suppress(OSError), tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
        return os.open(os.devnull, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise NoWorkerError(f"a worker can't be started: {error}") from error


def _absolute(path: str) -> str:
    """Return an entry of `sys.path` as an absolute path, or nothing."""
    try:
        return os.path.abspath(path)
    except OSError:  # relative to a directory that was removed
        return ""


def _clause(words: str) -> str:
    return f": {words}" if words else ""
