"""Trace: which headers a compile opened, told by the compiler itself.

`--fdevice-time-trace=BASE` (CUDA 13.0 and later) writes `BASE.json`, a Chrome trace in which each
opened header is an event named "Processing Header File". Two traps, both measured:

*The file.* If NVRTC cannot open or write it, LLVM aborts the whole process. So the name is a
symlink to ``/proc/self/fd/N``, where N is a memfd that this process has opened already.

*A compile that fails inside a header* (a missing include, `#error`) leaves a counter in NVRTC
unbalanced, for good and for all threads. From then on, traces lack every header that the source
includes itself but the last one; headers included by headers stay complete. Then the
`__nv_nvrtc_builtin_header.h` event, the first of that kind, is missing too, which tells. Callers
that get `complete=False` add the source's own includes by reading its text.

After any failure NVRTC also goes on tracing: the next compile, even without the option, writes its
trace to `.json` in the working directory. The frontend compiles nothing, traced, to prevent that.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import ClassVar, NamedTuple

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

from kcache.util.forks import after_fork

__all__ = ["Following", "Trace", "Tracer"]

_BUILTIN = "__nv_nvrtc_builtin_header.h"
#: How LLVM ends an event; before that stand its detail, a JSON string, and its duration.
_EVENT = b',"name":"Processing Header File"'
_DETAIL = b'"detail":'
#: Don't trace with fewer free descriptors than this: NVRTC must be able to open the file.
_SPARE_DESCRIPTORS = 64
#: ... nor under a file size limit below this: it counts for memfds too. CUTLASS writes 7 MB.
_LEAST_FILE_SIZE = 256 << 20


class Trace(NamedTuple):
    """What the compiler said it opened.

    Attributes:
        headers: paths as opened, each once, in no particular order; in-memory headers by their
            include name; NVRTC's own header left out.
        complete: False where headers that the source includes itself may be missing.
    """

    headers: frozenset[str]
    complete: bool


class Following:
    """One traced compile under way: pass its `flag` on, then `read`, and in any case `end`."""

    __slots__ = ("_fd", "_overlapped", "failed", "flag")

    #: Traced compiles under way in this process; the trace's state is NVRTC's, so the process's.
    _active: ClassVar[set[Following]] = set()
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, fd: int, flag: str) -> None:
        self._fd = fd
        self.flag = flag
        #: To be set by the caller before `end` if the compiler refused the source.
        self.failed = False
        self._overlapped = False
        with self._guard:
            self._active.add(self)

    def read(self) -> Trace | None:
        """Return what a compile that has succeeded told, or None where it told nothing."""
        try:
            raw = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
            headers: set[str] = {json.loads(detail) for detail in set(_details(raw))}
        except (OSError, ValueError):
            return None
        if not raw:
            return None
        # A compile beside this one that fails inside a header spoils the trace of both.
        with self._guard:
            alone = self._active == {self} and not self._overlapped
        return Trace(frozenset(headers - {_BUILTIN}), alone and _BUILTIN in headers)

    def end(self) -> None:
        """Give the file back."""
        with self._guard:
            self._active.discard(self)
            if self.failed:
                for other in self._active:
                    other._overlapped = True
        os.close(self._fd)


def _details(raw: bytes) -> Iterator[bytes]:
    """Yield the detail of each event of a header: `"detail":DETAIL},"dur":N,"name":...`.

    A quote inside a JSON string is escaped, so neither mark can stand inside one.

    Raises:
        ValueError: the events look different.
    """
    at = raw.find(_EVENT)
    while at >= 0:
        start = raw.rindex(_DETAIL, 0, at) + len(_DETAIL)
        detail, brace, duration = raw[start:at].rpartition(b'},"dur":')
        if not brace or not duration.isdigit():
            raise ValueError("an event of another form")
        yield detail
        at = raw.find(_EVENT, at + len(_EVENT))


class Tracer:
    """Gives compiles a flag that makes them tell their headers.

    The links live in a temporary directory of the process, not in the cache's: should they be
    removed while the compiler runs, it would abort the process, and people remove caches.

    Threads: safe to share; each compile has its own file. Fork: the child may go on. Crash: leaves
    a directory with a few symlinks.

    Args:
        directory: private directory for the symlinks where no temporary one can be made.
    """

    def __init__(self, directory: str | None = None) -> None:
        self._directory = directory
        self._temporary = ""
        #: The process whose temporary directory it is; a forked child makes its own.
        self._owner = 0
        self._lock = threading.Lock()
        after_fork(self)

    def begin(self) -> Following | None:
        """Return a compile to follow, or None where it can't be done without risk."""
        if not _room_for_trace():
            return None
        fd = -1
        try:
            fd = os.memfd_create("kcache-trace", os.MFD_CLOEXEC)
            base = self._link(fd)
            # NVRTC will open this name for writing; see that it can, and that it is our file.
            with open(f"{base}.json", "wb") as file:
                if os.fstat(file.fileno()).st_ino != os.fstat(fd).st_ino:
                    raise OSError("the link leads elsewhere")
        except (OSError, AttributeError):  # no memfd, no /proc, nowhere to put a link
            if fd >= 0:
                os.close(fd)
            return None
        return Following(fd, f"--fdevice-time-trace={base}")

    def after_fork(self) -> None:
        """Replace the lock, in a child process whose parent may have held it at the fork."""
        self._lock = threading.Lock()

    def _link(self, fd: int) -> str:
        """Return a path that becomes a link to descriptor `fd` once `.json` is appended."""
        target = f"/proc/self/fd/{fd}"
        with self._lock:
            if self._owner != os.getpid() or not os.path.isdir(self._temporary):
                self._owner = 0
                with suppress(OSError):
                    self._temporary = tempfile.mkdtemp(prefix="kcache-trace-")
                    self._owner = os.getpid()
                    weakref.finalize(self, _remove, self._temporary, self._owner)
            if self._owner:
                return _symlink(self._temporary, fd, target)
            if self._directory is None:
                raise OSError("nowhere to put a link")
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            return _symlink(self._directory, fd, target)


def _remove(directory: str, owner: int) -> None:
    """Remove a temporary directory, unless this is a child of the process that made it."""
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)


def _symlink(directory: str, fd: int, target: str) -> str:
    base = f"{directory}/{fd}"
    name = f"{base}.json"
    with suppress(FileExistsError):
        os.symlink(target, name)
    if os.readlink(name) != target:
        os.unlink(name)
        os.symlink(target, name)
    return base


def _room_for_trace() -> bool:
    """Tell whether NVRTC will be able to open and write one more file."""
    if resource is None:
        return False
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < _LEAST_FILE_SIZE:
        return False
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        return False
    return descriptors == resource.RLIM_INFINITY or used + _SPARE_DESCRIPTORS <= descriptors


def _after_fork_in_child() -> None:
    """Forget the compiles of the parent's threads, which may have held the lock."""
    Following._guard = threading.Lock()
    Following._active.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
