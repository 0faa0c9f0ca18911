"""Makes this process look like Windows to kcache: what POSIX alone has is gone.

Run as `python without_posix.py SCRIPT ARGUMENT...`. Modules of others are imported before, as they
were made for the real system. A simulation shows that kcache asks for no call that is not there; it
does not show that kcache works on Windows.
"""

import fcntl
import importlib
import os
import runpy
import select
import signal
import socket
import sys
from types import ModuleType

_FIRST = (
    *("asyncio", "concurrent.futures", "contextlib", "ctypes.util", "hashlib", "inspect", "json"),
    *("importlib.metadata", "logging", "multiprocessing", "platform", "shutil", "ssl", "stat"),
    *("subprocess", "sysconfig", "tempfile", "threading", "uuid", "zoneinfo", "pathlib"),
    *("click.shell_completion", "rich.console", "rich.progress", "xxhash"),
)
_MODULES = ("fcntl", "grp", "pwd", "resource", "termios", "pty", "tty", "syslog")
_OS = (
    *("fork", "forkpty", "register_at_fork", "geteuid", "getuid", "getegid", "getgid", "getgroups"),
    *("pread", "pwrite", "preadv", "pwritev", "posix_fallocate", "statvfs", "fstatvfs", "fchown"),
    *("sched_getaffinity", "memfd_create", "MFD_CLOEXEC", "eventfd", "pidfd_open", "environb"),
    *("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "O_DIRECTORY", "O_PATH", "O_NOATIME", "killpg"),
    *("setsid", "getpgid", "waitid", "WNOHANG", "wait4", "fdatasync", "getloadavg", "nice"),
    *("mkfifo", "mknod", "chown", "lchown", "umask", "sendfile", "lockf", "posix_fadvise"),
)
_SOCKET = ("AF_UNIX", "SO_PEERCRED", "socketpair")
_SIGNALS = ("SIGALRM", "SIGSTOP", "SIGCONT", "SIGHUP", "SIGUSR1", "pthread_sigmask")
#: These have parts for each system; the ones loaded are for the system that this really is.
_REAL = ("shutil",)


def _locking(fd: int, mode: int, length: int) -> None:
    """Locks a range at the position of a file, as `msvcrt.locking` does."""
    kind = fcntl.LOCK_UN if mode == _msvcrt.LK_UNLCK else fcntl.LOCK_EX | fcntl.LOCK_NB
    fcntl.lockf(fd, kind, length, os.lseek(fd, 0, os.SEEK_CUR))


for name in _FIRST:
    importlib.import_module(name)
_msvcrt = ModuleType("msvcrt")
vars(_msvcrt).update(LK_UNLCK=0, LK_LOCK=1, LK_NBLCK=2, locking=_locking)
sys.modules["msvcrt"] = _msvcrt
_os = ModuleType("os")
vars(_os).update(vars(os))
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] in _REAL and hasattr(module, "os"):
        module.os = _os  # type: ignore[attr-defined]
for name in _MODULES:
    sys.modules[name] = None  # type: ignore[assignment]
for module, names in (
    (os, _OS),
    (socket, _SOCKET),
    (signal, _SIGNALS),
    (select, ("poll", "epoll")),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
os.supports_dir_fd.clear()
os.supports_fd.clear()
os.supports_follow_symlinks.clear()
sys.platform = "win32"

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
