"""WorkerProcess: one worker, as the program that started it sees it."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from subprocess import Popen, TimeoutExpired
from threading import Lock
from typing import TYPE_CHECKING

from kcache.errors import KcacheError
from kcache.nvrtc.workers.messages import BEGUN, Ask, Hello, Reply, pack
from kcache.util.child_process import ISOLATED, children_are_elsewhere, without_dropin
from kcache.util.open_file import identity
from kcache.util.wire import WireError, receive, send

if TYPE_CHECKING:
    from collections.abc import Mapping

_CODE = (
    "import sys; path, parent, *sys.path[:] = sys.argv[1:]; sys.argv[1:] = path, parent; "
    "from kcache.nvrtc.workers.worker import main; main()"
)
#: How many bytes of a crashed worker's output an error quotes.
_QUOTED = 2048
#: A worker that compiles sends a heartbeat twice a second. If there is none for twice this many
#: seconds, the worker was stopped, and is ended. Twice, because this process may have been stopped
#: together with it.
_SILENCE = 5.0
#: The same for a new worker, which has to load Python and the compiler, perhaps from a network.
_START = 30.0


class NoWorkerError(KcacheError):
    """No worker can be started here; the message has the reason. Never reaches a caller."""


class CrashedError(KcacheError):
    """A worker ended during a compile; the message explains how."""


class TooLateError(KcacheError):
    """A compile exceeded its time limit."""


def interpreter() -> str:
    """Return the interpreter that workers run in.

    Raises:
        NoWorkerError: this program has no interpreter (it is embedded or frozen).
    """
    path = sys.executable or ""
    frozen = getattr(sys, "frozen", False)
    if frozen or not os.path.basename(path).lower().startswith(("python", "pypy")):
        raise NoWorkerError(f"a Python interpreter is needed; sys.executable is {path!r}")
    if children_are_elsewhere():
        raise NoWorkerError("the program has left its PID namespace for its child processes")
    return path


def credentials() -> tuple[object, ...]:
    """Return the user, the file tree and the processors of a process that is started now.

    If the program has become another user or changed its root since a worker was started, that
    worker would read files that the program may not read, or other files. If the program was bound
    to other processors since then, the worker would take a processor from others.
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
    """One worker. Used by one thread at a time; `stop` may be called by any.

    Processes: it ends with this one, also after SIGKILL, and is ended if it is stopped. Fork: a
    child calls `forget` and leaves the worker to its parent. It inherits no descriptor but its
    three.

    Args:
        library: path of the compiler.

    Attributes:
        compiles: the number of compiles so far.
        peak: the largest memory in bytes.
        directory: the last working directory of a compile.
        reusable: whether it compiles the next request as a new worker would.
    """

    def __init__(self, library: str) -> None:
        self.library = library
        self.environment: Mapping[str, str] = {}
        self.credentials = credentials()
        self.hello = Hello("", (0, 0), ())
        self.compiles = 0
        self.peak = 0
        self.directory: str | None = None
        self.reusable = False
        self._process: Popen[bytes] | None = None
        #: Descriptors: where it reads and this process writes; where this process reads and it
        #: writes; its standard error. And the files that they led to when they were opened.
        self._fds: list[int] = []
        self._files: list[tuple[int, int]] = []
        #: The end of what it wrote to its standard error, once it was ended.
        self._stderr = ""
        self._silence = _START
        self._limit: float | None = None
        self._ending = Lock()
        self._deadline: float | None = None

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the process, with the variables that this process has now.

        Raises:
            NoWorkerError: it can't be started, or can't load the library.
        """
        self.environment = environment
        try:
            self._begin()
            self.hello = Hello.unpack(receive(self._fds[2], self._read))
            self._silence = _SILENCE
        except (WireError, OSError, ValueError, RuntimeError) as error:
            self.end()  # Python starts no process in an isolated sub-interpreter: RuntimeError
            how = f"can't be started: {error}" if self._process is None else self._how(error)
            raise NoWorkerError(f"a worker {how}") from error
        if self.hello.error:
            self.end()
            raise NoWorkerError(self.hello.error)

    def _begin(self) -> None:
        self._fds += os.pipe()
        self._fds += os.pipe()
        try:
            self._fds.append(os.memfd_create("kcache-worker", os.MFD_CLOEXEC))
        except (OSError, AttributeError):  # a sandbox forbids it, or another system
            self._fds.append(os.open(os.devnull, os.O_RDWR))
        os.set_blocking(self._fds[1], False)
        self._files = [identity(os.fstat(fd)) for fd in self._fds]
        paths = (path for path in sys.path if isinstance(path, str))  # pyright: ignore[reportUnnecessaryIsInstance]
        folders = filter(None, map(_absolute, paths))
        self._process = Popen(
            [interpreter(), *ISOLATED, "-c", _CODE, self.library, str(os.getpid()), *folders],
            stdin=self._fds[0],
            stdout=self._fds[3],
            stderr=self._fds[4],
            bufsize=0,
            env=without_dropin(self.environment),
            # A group of its own: the program decides what an interrupt at the terminal does.
            process_group=None if sys.platform == "win32" else 0,
        )
        self._close(0, 3)

    def ask(self, ask: Ask, timeout: float | None) -> Reply:
        """Compile a request.

        Raises:
            CrashedError: the worker has ended, or was stopped and then ended; TooLateError: it took
                longer than `timeout` seconds and was ended.
        """
        if not self.is_whole():
            self.end()
            raise CrashedError("the program has closed the descriptors of the worker")
        self._limit, self._deadline = timeout, None
        try:
            send(self._fds[1], pack(ask), self._write)
            reply = Reply.unpack(self._reply())
        except (WireError, OSError) as error:
            self.end()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                what = f"the compile took longer than {timeout:g} s (compile_timeout)"
                raise TooLateError(what) from error
            raise CrashedError(f"the compiler {self._how(error)}") from error
        self.compiles += 1
        self.peak = reply.peak
        return reply

    def fits(self, other: WorkerProcess) -> bool:
        """Return whether this worker can compile in place of another one."""
        return self.library == other.library and self.credentials == other.credentials

    def _reply(self) -> list[bytes]:
        """Return the worker's answer, which follows its heartbeats."""
        while (fields := receive(self._fds[2], self._read)) in ([], [BEGUN]):
            if fields and self._limit is not None:
                self._deadline = time.monotonic() + self._limit
        return fields

    def _read(self, fd: int, size: int) -> bytes:
        self._await(fd, writing=False)
        return os.read(fd, size)

    def _write(self, fd: int, data: memoryview) -> int:
        while not self._await(fd, writing=True):
            receive(self._fds[2], self._read)  # a heartbeat
        return _write(fd, data)

    def _await(self, fd: int, *, writing: bool) -> bool:
        """Wait until a pipe is ready; return False if only the other one is, for reading.

        Raises:
            TimeoutError: the worker was stopped, or the compile takes too long.
        """
        if sys.platform == "win32":
            return True
        silent = 0
        while silent < 2:
            left = self._silence
            if self._deadline is not None:
                left = min(left, max(0.0, self._deadline - time.monotonic()))
            ready = _ready(self._fds[2], [fd] if writing else [], left)
            if ready:
                return fd in ready
            if left < self._silence:
                break
            silent += 1
        raise TimeoutError(f"was stopped: no heartbeat for {2 * self._silence:g} s")

    @property
    def ended(self) -> bool:
        """Whether the worker was ended."""
        return self._process is None or self._process.returncode is not None

    @property
    def pid(self) -> int:
        """The worker's process id; 0 if there is none."""
        return 0 if self._process is None else self._process.pid

    def is_whole(self) -> bool:
        """Return whether the pipes still lead to the worker.

        They do not if the program has closed descriptors that are not its own, as programs do that
        become daemons. Files of the program may now have these numbers.
        """
        return self._is_open(1) and self._is_open(2)

    def _is_open(self, number: int) -> bool:
        try:
            return identity(os.fstat(self._fds[number])) == self._files[number]
        except (OSError, IndexError):
            return False

    def stop(self) -> None:
        """Kill the worker, whatever it is doing; the thread that uses it notices."""
        if self._process is not None:
            with suppress(OSError):
                self._process.kill()

    def end(self) -> None:
        """End the worker, whatever it is doing. Idempotent; nothing if another thread does so."""
        if not self._ending.acquire(blocking=False):
            return
        try:
            # It ends by itself when its input ends: a program that has changed its user may not
            # send it a signal.
            self._close(0, 1, 2, 3)
            self.stop()
            if not self.ended:
                self._wait()
            self._read_stderr()
            self._close(4)
        finally:
            self._ending.release()

    def _wait(self) -> None:
        assert self._process is not None
        with suppress(TimeoutExpired):
            self._process.wait(None if sys.platform == "win32" else _SILENCE)

    def forget(self) -> None:
        """Close this side's pipes in a forked child; the parent keeps the worker."""
        if self._process is not None:
            self._process.returncode = 0  # not this process's child: nothing to wait for
        self._close(0, 1, 2, 3, 4)

    def _close(self, *numbers: int) -> None:
        """Close descriptors, unless the program has closed them and opened others."""
        for number in filter(range(len(self._fds)).__contains__, numbers):
            if number >= len(self._files) or self._is_open(number):
                with suppress(OSError):
                    os.close(self._fds[number])
            self._fds[number] = -1

    def _how(self, error: Exception) -> str:
        """Return how the worker ended, as the predicate of a sentence about it."""
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
            if self._is_open(4):
                fd = self._fds[4]
                os.lseek(fd, max(0, os.fstat(fd).st_size - _QUOTED), os.SEEK_SET)
                self._stderr = os.read(fd, _QUOTED).decode(errors="replace").strip()


def _ready(reading: int, writing: list[int], seconds: float) -> list[int]:
    """Return which of the descriptors are ready, after a wait of at most `seconds`."""
    if not hasattr(select, "poll"):  # eventlet removed it; its `select` runs other green threads
        readable, writable, _ = select.select([reading], writing, [], seconds)
        return [*readable, *writable]
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    for fd in writing:
        poll.register(fd, select.POLLOUT)
    return [fd for fd, _ in poll.poll(1000 * seconds)]


def _write(fd: int, data: memoryview) -> int:
    """Write to a worker; raises BrokenPipeError if it has ended.

    Python ignores SIGPIPE. A program may have switched that off, as many command lines do, and an
    embedded interpreter may never have switched it on. Then a worker that ended while it was idle
    would end the program. So the signal is blocked during the write, and that of this write is
    consumed.
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


def _absolute(path: str) -> str:
    """Return an entry of `sys.path` as an absolute path, or nothing."""
    try:
        return os.path.abspath(path)
    except OSError:  # relative to a directory that was removed
        return ""
