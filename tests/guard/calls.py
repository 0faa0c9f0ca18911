"""Calls: the system calls of a process between two marks, as strace (Linux) lists them.

What can differ from one machine or run to the next without anybody reading or writing a file is
left out: memory, threads, clocks, who the process is. Names of one call under several numbers are
made one: `newfstatat`, `statx` and `stat` are "stat".
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from guard.child import output
from guard.measure import MARK

__all__ = ["Call", "between_marks", "no_strace", "places", "traced"]

_LEFT_OUT = {
    *("mmap", "munmap", "mremap", "mprotect", "madvise", "brk", "msync"),
    *("futex", "sched_yield", "rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "clone", "clone3"),
    *("clock_gettime", "clock_nanosleep", "gettimeofday", "getrandom", "restart_syscall"),
    *("getpid", "gettid", "getuid", "geteuid", "getgid", "getegid"),
    # Calls of Python's `open` itself, which finds out the position and whether it is a terminal.
    *("lseek", "ioctl"),
}
_NAMES = {
    "openat": "open",
    "newfstatat": "stat",
    "statx": "stat",
    "lstat": "stat",
    "pread64": "read",
    "preadv": "read",
    "readv": "read",
    "pwrite64": "write",
    "pwritev": "write",
    "writev": "write",
    "renameat": "rename",
    "renameat2": "rename",
    "unlinkat": "unlink",
    "mkdirat": "mkdir",
    "getdents64": "list",
    "getdents": "list",
    "utimensat": "utime",
    "readlinkat": "readlink",
    "faccessat": "access",
    "faccessat2": "access",
}
_LINE = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+|\?|0x[0-9a-f]+)(.*)")
#: The descriptor of an open file with its path, or a path of its own.
_PATH = re.compile(r'(?:\b(?P<fd>\d+)<(?P<opened>/[^>]*)>|"(?P<given>[^"]*)")')
#: A path that is relative to an open directory, or to the one that the process is in.
_RELATIVE = re.compile(r'(?:AT_FDCWD|\d+)<(/[^>]*)>, "([^"]*)"')
_DESCRIPTORS = "/proc/self/fd/"


class Call(NamedTuple):
    """One system call.

    Attributes:
        what: which one, by the name that it has here.
        path: of the file that it is about, or "".
        result: what it returned.
        text: as strace wrote it.
    """

    what: str
    path: str
    result: int
    text: str


@cache
def no_strace() -> str | None:
    """Return why system calls can't be listed here, or None if they can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    done = subprocess.run(
        ["strace", "-f", "-y", "-o", os.devnull, "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    return f"strace does not work here: {done.stderr.strip()[:200]}"


def traced(command: Sequence[str], home: Path) -> list[Call]:
    """Runs a command, which must succeed; returns the calls of its first process, in order."""
    # Strings are written at length: the paths among them must not be cut.
    options = ["-f", "-y", "-qq", "-e", "signal=none", "-s", "400"]
    with TemporaryDirectory() as folder:  # not in `home`, which is watched: it would change
        log = Path(folder, "calls")
        output(["strace", *options, "-o", str(log), *command], home)
        with log.open(encoding="utf-8", errors="replace") as lines:
            return list(_calls(lines))


def _calls(lines: Iterator[str]) -> Iterator[Call]:
    first = ""
    begun: dict[str, str] = {}
    for line in lines:
        process = line.split(" ", 1)[0]
        first = first or process
        if line.endswith("<unfinished ...>\n"):
            begun[process] = line.removesuffix("<unfinished ...>\n")
            continue
        before, resumed, after = line.partition("resumed>")
        whole = begun.pop(process, "") + after if resumed else before
        call = _call(whole) if process == first else None
        if call is not None:
            yield call


def _call(line: str) -> Call | None:
    match = _LINE.match(line)
    if match is None or match[2] in _LEFT_OUT:
        return None
    what, arguments, result = match[2], match[3], match[4]
    found = _PATH.search(arguments)
    path = "" if found is None else found["opened"] or found["given"]
    what = _NAMES.get(what, what)
    if found is not None and found["fd"] and what == "stat":
        # `fstat` is now and then a `stat` of a path that is relative to the open file.
        what = "fstat" if '""' in arguments else "stat"
    if what == "fcntl" and "SETLK" in arguments:
        what = "unlock" if "F_UNLCK" in arguments else "lock"
    at = match[2] == "statx" or match[2].rstrip("2").endswith("at")
    if at and (relative := _RELATIVE.match(arguments)):
        path = os.path.join(*relative.groups()) if relative[2] else relative[1]
    if path.startswith(_DESCRIPTORS) and (opened := re.match(r"<(/[^>]*)>", match[5])):
        path = opened[1]  # by the number of an open directory
    return Call(what, path, int(result, 0) if result != "?" else 0, line.strip())


def between_marks(calls: Sequence[Call]) -> dict[str, list[Call]]:
    """Returns the calls of each scenario, under its name."""
    found: dict[str, list[Call]] = {}
    current: list[Call] | None = None
    for call in calls:
        if call.path.startswith(f"{MARK}/begin "):
            current = found.setdefault(call.path.removeprefix(f"{MARK}/begin "), [])
        elif call.path.startswith(f"{MARK}/end "):
            current = None
        elif current is not None:
            current.append(call)
    return found


_ENTRY = re.compile(r"[0-9a-f]{2}/[0-9a-f]{64}")
_SHARD = re.compile(r"(?<![^/])(?!db)[0-9a-f]{2}$")  # db is LMDB's
_TEMPORARY = re.compile(r"[0-9a-f]{2}/\.[^/]*\.tmp")


def places(calls: Sequence[Call], place: Path) -> list[str]:
    """Returns "what path" of each call, with paths below `place`; keys are called entry or temp."""
    said: list[str] = []
    for call in calls:
        path = call.path
        if path.startswith(f"{place}/"):
            path = path.removeprefix(f"{place}/")
            path = _ENTRY.sub("ENTRY", _TEMPORARY.sub("TEMPORARY", path))
            path = _SHARD.sub("SHARD", path)
        said.append(f"{call.what} {path}".rstrip())
    return said
