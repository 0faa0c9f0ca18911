"""WorkerProcess: starts a worker process, sends requests to it, and ends it."""

from __future__ import annotations

# gevent and eventlet replace the sockets of the module `socket`, but not those of `_socket`.
import _socket
import os
import signal
import sys
import time
from contextlib import closing, suppress
from subprocess import Popen, TimeoutExpired
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

from kcache.errors import KcacheError
from kcache.nvrtc.workers.messages import BEGUN, Ask, Hello, Reply, pack
from kcache.util.child_process import ISOLATED, children_are_elsewhere, without_dropin
from kcache.util.forks import importing
from kcache.util.open_file import identity
from kcache.util.wire import WireError, receive, send

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_T = TypeVar("_T")

_CODE = (
    "import sys; path, parent, *sys.path[:] = sys.argv[1:]; sys.argv[1:] = path, parent; "
    "from kcache.nvrtc.workers.worker import main; main()"
)
#: An error quotes at most this many bytes from the end of a crashed worker's output.
_QUOTED = 2048
#: A worker that compiles sends a heartbeat twice a second. If none arrives for this many seconds,
#: twice in a row, the worker is considered stopped and is ended. Once is not enough, because this
#: process may have been stopped together with the worker.
_SILENCE = 5.0
#: The same for a new worker, which has to load Python and the compiler, perhaps from a network file
#: system.
_START = 30.0


class NoWorkerError(KcacheError):
    """No worker can be started here; the message contains the reason.

    kcache handles this error itself. It never reaches a caller of kcache.
    """


class CrashedError(KcacheError):
    """A worker ended during a compile; the message explains how."""


class TooLateError(KcacheError):
    """A compile exceeded its time limit."""


def interpreter() -> str:
    """Return the path of the Python interpreter that runs the workers.

    Raises:
        NoWorkerError: this program has no interpreter, because it is embedded or frozen; or its
            child processes would be in another PID namespace.
    """
    path = sys.executable or ""
    frozen = getattr(sys, "frozen", False)
    if frozen or not os.path.basename(path).lower().startswith(("python", "pypy")):
        raise NoWorkerError(f"sys.executable: expected a Python interpreter, got {path!r}")
    if children_are_elsewhere():
        raise NoWorkerError("child processes of the program would be in another PID namespace")
    return path


def credentials() -> tuple[object, ...]:
    """Return the user, root directory, mounts and processors that a new process would have.

    A worker is used only while they are the same as when it was started. If the program has changed
    its user or its root directory since then, the worker could read files that the program may not
    read, or different files. If the program was bound to other processors, the worker would use
    processors that the program may not use.
    """
    if sys.platform == "win32":
        return ()
    root = os.stat("/")
    try:
        mounts = os.readlink("/proc/self/ns/mnt")
    except OSError:
        mounts = ""
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    users = (os.geteuid(), os.getegid(), *sorted(os.getgroups()))
    return (*users, root.st_dev, root.st_ino, mounts, frozenset(processors))


class WorkerProcess:
    """The object by which a program starts, uses and ends one worker process.

    Threads: Only one thread may use the object at a time, but any thread may call `stop`.
    Processes: The worker exits when this process exits, even if this process is killed by SIGKILL.
    A worker that does not send heartbeats is killed. The worker inherits only its three standard
    descriptors. Fork: A forked child calls `forget`, and the worker stays with the parent.

    Args:
        library: the path of the NVRTC that compiles.

    Attributes:
        kind: the path of the library, and the credentials with which the worker is started. Two
            workers with equal kinds can compile in place of each other.
        environment: the variables with which the worker was started.
        hello: the worker's first message.
        compiles: the number of compiles so far.
        peak: the most memory that the worker has used so far, in bytes.
        directory: the working directory of the last compile; None before the first compile.
        reusable: whether the worker would compile the next request as a new worker would.
    """

    def __init__(self, library: str) -> None:
        self.kind = library, credentials()
        self.environment: Mapping[str, str] = {}
        self.hello = Hello("", (0, 0), ())
        self.compiles = 0
        self.peak = 0
        self.directory: str | None = None
        self.reusable = False
        self._process: Popen[bytes] | None = None
        self._socket: _socket.socket | None = None
        #: The descriptor of the file to which the worker writes its standard error.
        self._output = -1
        #: The identities of the socket and of that file.
        self._files: list[tuple[int, int]] = []
        #: The end of the worker's standard error, set when the worker is ended.
        self._stderr = ""
        self._silence = _START
        self._ending = Lock()
        self._deadline: float | None = None

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the worker with the variables in `environment`; wait until the library is loaded.

        Raises:
            NoWorkerError: the worker can't be started, or can't load the library.
        """
        self.environment = environment
        try:
            with importing:  # a forked child would inherit the pipe that Popen waits for
                self._begin()
            self.hello = Hello.unpack(receive(self._read))
            self._silence = _SILENCE
        except (WireError, OSError, ValueError, RuntimeError) as error:
            self.end()  # Python starts no process in an isolated sub-interpreter: RuntimeError
            how = f"can't be started: {error}" if self._process is None else self._how(error)
            raise NoWorkerError(f"a worker {how}") from error
        if self.hello.error:
            self.end()
            raise NoWorkerError(self.hello.error)

    def _begin(self) -> None:
        if sys.platform == "win32":
            raise OSError("workers run on Linux only")
        self._socket, theirs = _socket.socketpair()
        try:
            self._output = os.memfd_create("kcache-worker", os.MFD_CLOEXEC)
        except (OSError, AttributeError):  # a sandbox forbids it, or another system
            self._output = os.open(os.devnull, os.O_RDWR)
        self._files = [identity(os.fstat(fd)) for fd in (self._socket.fileno(), self._output)]
        paths = (path for path in sys.path if isinstance(path, str))  # pyright: ignore[reportUnnecessaryIsInstance]
        folders = filter(None, map(_absolute, paths))
        with closing(theirs):
            self._process = Popen(
                [interpreter(), *ISOLATED, "-c", _CODE, self.kind[0], str(os.getpid()), *folders],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._output,
                bufsize=0,
                env=without_dropin(self.environment),
                # A group of its own, because only the program handles an interrupt at the terminal.
                process_group=0,
            )

    def ask(self, ask: Ask, timeout: float | None) -> Reply:
        """Send a request to the worker, and return the reply.

        After an error, the worker has ended.

        Raises:
            CrashedError: the worker has exited or sent no heartbeat, or the program has closed the
                socket to the worker.
            TooLateError: the compile exceeded `timeout` seconds.
        """
        if not self.is_whole():
            self.end()
            raise CrashedError("the program has closed the socket to the worker")
        self._deadline = None
        try:
            send(self._write, pack(ask))
            while (fields := receive(self._read)) in ([], [BEGUN]):  # heartbeats
                if fields and timeout is not None:
                    self._deadline = time.monotonic() + timeout
            reply = Reply.unpack(fields)
        except (WireError, OSError) as error:
            self.end()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                what = f"the compile exceeded the limit of {timeout:g} s (compile_timeout)"
                raise TooLateError(what) from error
            raise CrashedError(f"the compiler {self._how(error)}") from error
        self.compiles += 1
        self.peak = reply.peak
        return reply

    def _read(self, size: int) -> bytes:
        assert self._socket is not None
        return self._patiently(self._socket.recv, size)

    def _write(self, data: memoryview) -> int:
        """Send `data`, and return how many bytes were sent.

        If the worker has exited, this raises OSError; the program gets no SIGPIPE.
        """
        assert self._socket is not None
        return self._patiently(self._socket.send, data, _socket.MSG_NOSIGNAL)

    def _patiently(self, call: Callable[..., _T], *arguments: object) -> _T:
        """Return the result of `call`, a method of the socket that may have to wait for the worker.

        Raises:
            TimeoutError: the worker sends no heartbeat in time, or the compile exceeds its
                deadline.
        """
        assert self._socket is not None
        for _ in range(2):
            left = self._silence
            if self._deadline is not None:
                left = min(left, max(0.001, self._deadline - time.monotonic()))
            self._socket.settimeout(left)
            with suppress(TimeoutError):
                return call(*arguments)
            if left < self._silence:
                break
        raise TimeoutError(f"was stopped: no heartbeat for {2 * self._silence:g} s")

    @property
    def ended(self) -> bool:
        """Whether the worker has exited, or was never started."""
        return self._process is None or self._process.poll() is not None

    @property
    def pid(self) -> int:
        """The worker's process id; 0 if the worker was never started."""
        return 0 if self._process is None else self._process.pid

    def is_whole(self) -> bool:
        """Return whether the socket to the worker is still open.

        It is not if the program has closed all descriptors, as programs do when they become
        daemons. Another file of the program may then have the number of the socket's descriptor.
        """
        return self._socket is not None and self._is_open(self._socket.fileno(), 0)

    def _is_open(self, fd: int, number: int) -> bool:
        try:
            return identity(os.fstat(fd)) == self._files[number]
        except (OSError, IndexError):
            return False

    def stop(self) -> None:
        """Kill the worker, even if it is busy; a thread that is in `ask` then gets CrashedError."""
        if self._process is not None:
            with suppress(OSError):
                self._process.kill()

    def end(self) -> None:
        """End the worker, even if it is busy, and keep the end of its standard error.

        If the worker has ended already, or another thread is in this method, nothing happens.
        """
        if not self._ending.acquire(blocking=False):
            return
        try:
            # A worker exits at the end of its input. A program that has changed its user may not be
            # allowed to send it a signal.
            self._hang_up()
            self.stop()
            if self._process is not None and not self.ended:
                with suppress(TimeoutExpired):
                    self._process.wait(_SILENCE)
            self._read_stderr()
            self._close_output()
        finally:
            self._ending.release()

    def forget(self) -> None:
        """Close the worker's descriptors in a forked child; the worker stays with the parent."""
        if self._process is not None:
            self._process.returncode = 0  # so that Popen does not wait: the worker is no child here
        self._hang_up()
        self._close_output()

    def _hang_up(self) -> None:
        """Close the socket.

        If the program has closed it already, its descriptor is left alone, because the descriptor
        may belong to another file now.
        """
        if self._socket is not None:
            if self.is_whole():
                self._socket.close()
            else:
                self._socket.detach()
            self._socket = None

    def _close_output(self) -> None:
        if self._is_open(self._output, 1):
            os.close(self._output)
        self._output = -1

    def _how(self, error: Exception) -> str:
        """Return how the worker ended, as the predicate of a sentence about the worker."""
        stderr = f": {self._stderr}" if self._stderr else ""
        if isinstance(error, TimeoutError):
            return f"{error}{stderr}"
        status = self._process.returncode if self._process is not None else None
        if status is None or status >= 0:
            return f"ended with status {status}{stderr}"
        with suppress(ValueError):
            return f"was killed by signal {-status} ({signal.Signals(-status).name}){stderr}"
        return f"was killed by signal {-status}{stderr}"

    def _read_stderr(self) -> None:
        with suppress(OSError):
            fd = self._output
            if self._is_open(fd, 1):
                start = max(0, os.fstat(fd).st_size - _QUOTED)
                self._stderr = os.pread(fd, _QUOTED, start).decode(errors="replace").strip()


def _absolute(path: str) -> str:
    """Return `path`, an entry of `sys.path`, as an absolute path; empty if that is impossible."""
    try:
        return os.path.abspath(path)
    except OSError:  # relative to a directory that was removed
        return ""
