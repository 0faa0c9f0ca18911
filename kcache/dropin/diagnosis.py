"""Diagnosis: decides whether `kcache run` reaches a program, and says why it does not.

Without running a program, nobody can know what it does with NVRTC. But its file shows whether it is
set-uid, linked statically, or linked with another C library than the interface libraries.
"""

from __future__ import annotations

import os
import shutil
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

from kcache.admin.doctor import OK, PROBLEM, WARNING, Finding
from kcache.dropin import build, libraries
from kcache.dropin import environment as env

__all__ = ["diagnose", "diagnose_program"]

_TOPIC = "kcache run"
#: Tells whether a program that opens the library at `sys.argv[1]` gets the interface library.
_PROBE = """
import ctypes, sys
handle = ctypes.CDLL(sys.argv[1])
print(hasattr(handle, "kcache_dropin_covers"))
"""
_TIMEOUT = 30
_SEGMENT_INTERPRETER, _SEGMENT_DYNAMIC, _SEGMENT_LOAD = 3, 2, 1
_NEEDED, _STRINGS = 1, 5
#: Linux follows so many first lines of scripts, and reads so many bytes of each (fs/exec.c).
_MOST_SCRIPTS, _MOST_LINE = 5, 256
_MARKS = (b"nvrtcCompileProgram", b"nvrtcCreateProgram")
#: Larger programs are not searched for an NVRTC that is linked into them, which itself has 100 MB.
_MOST_READ = 1 << 30


def diagnose() -> Iterator[Finding]:
    """Yield whether the interface libraries are there, and whether they answer for NVRTC."""
    from kcache.nvrtc import library

    install = "Install a C compiler (Debian: apt-get install gcc libc6-dev), or a wheel for Linux."
    try:
        folder = libraries.find_built(env.current())
    except (libraries.MissingError, OSError) as error:
        yield Finding(WARNING, _TOPIC, f"programs can't be served: {error}", install)
        return
    if folder is None:
        compiler = build.compiler()
        if compiler is None:
            what = "there are no interface libraries, and no C compiler to build them"
            yield Finding(WARNING, _TOPIC, what, install)
        else:
            what = f"the first use will build the interface libraries with {compiler}"
            yield Finding(OK, _TOPIC, what)
        return
    found = library.find()
    if found is None:
        yield Finding(OK, _TOPIC, f"the interface libraries are in {folder}")
        return
    reached = _probe(folder, found.path)
    if reached is None:
        yield Finding(OK, _TOPIC, f"programs that load {found.path} are reached")
    else:
        do = "Such programs run as they do without kcache. A newer kcache may reach them."
        yield Finding(WARNING, _TOPIC, f"{found.path} is not reached: {reached}", do)


def _probe(folder: str, path: str) -> str | None:
    """Return why a program that opens the library at `path` gets the real one, or None."""
    command = [sys.executable, "-I", "-c", _PROBE, path]
    try:
        variables = env.with_dropin(env.current(), libraries.preloaded(folder), "/nonexistent")
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired, libraries.MissingError) as error:
        return str(error)
    if done.stdout.strip() == "True":
        return None
    said = done.stderr.strip().splitlines()
    return said[-1] if said else "it has functions that this version of kcache does not know"


# -- one program -----------------------------------------------------------------------------------


class _Elf(NamedTuple):
    """What an ELF file says: the loader that starts it, and the libraries that it names."""

    interpreter: str
    needed: tuple[str, ...]


def diagnose_program(name: str) -> Iterator[Finding]:
    """Yield whether the drop-in would reach a program, as far as its file tells."""
    path = shutil.which(name)
    if path is None or not os.path.isfile(path):
        what = f"there is no program {name}"
        yield Finding(PROBLEM, _TOPIC, what, "Name a program or its path.")
        return
    path = os.path.realpath(path)
    try:
        runs = _what_runs(path)
        what = path if runs in (path, None) else f"{path} (run by {runs})"
        reason = _unreachable(runs) if runs else "its first line names no program"
        how = _how(runs) if runs else ""
    except OSError as error:
        what, reason, how = path, f"it can't be read: {error.strerror}", ""
    if reason is not None:
        do = "It runs under `kcache run` as it does without."
        yield Finding(WARNING, _TOPIC, f"{what} is not reached: {reason}", do)
        return
    yield Finding(OK, _TOPIC, f"{what} is reached{how}")


def _what_runs(path: str) -> str | None:
    """Return the program that runs if `path` is executed: of a script, its interpreter, or None.

    Raises:
        OSError: a file can't be read.
    """
    for _ in range(_MOST_SCRIPTS):
        with open(path, "rb") as file:
            first = file.read(_MOST_LINE)
        if not first.startswith(b"#!"):
            break
        words = os.fsdecode(first[2:].partition(b"\n")[0]).split()
        if words and os.path.basename(words[0]) == "env":
            words = [word for word in words[1:] if word[0] != "-" and "=" not in word]
        found = shutil.which(words[0]) if words else None
        if found is None or not os.path.isfile(found):
            return None
        path = os.path.realpath(found)
    return path


def _unreachable(path: str) -> str | None:
    status = os.stat(path)
    if status.st_mode & (stat.S_ISUID | stat.S_ISGID):
        return "it is set-uid or set-gid, so the loader takes nothing into it"
    elf = _read_elf(path)
    if elf is None:
        return "it is no 64-bit ELF program"
    if not elf.interpreter:
        return "it is linked statically"
    if "musl" in elf.interpreter:
        return f"it has another C library ({elf.interpreter})"
    if not any(each.startswith("libnvrtc.so") for each in elf.needed) and _has_nvrtc_inside(path):
        return "NVRTC seems to be linked into it"
    return None


def _how(path: str) -> str:
    elf = _read_elf(path)
    linked = [each for each in elf.needed if each.startswith("libnvrtc.so")] if elf else []
    return f"; it is linked with {linked[0]}" if linked else ", if it loads NVRTC"


def _has_nvrtc_inside(path: str) -> bool:
    """Tell whether a file itself defines NVRTC's functions, by its symbols."""
    if os.path.getsize(path) > _MOST_READ:
        return False
    with open(path, "rb") as file:
        content = file.read()
    return all(b"\0" + mark + b"\0" in content for mark in _MARKS) and b"nv_mangled_name" in content


def _read_elf(path: str) -> _Elf | None:
    """Read the program headers and the dynamic section (ELF gABI, chapter 5)."""
    try:
        with open(path, "rb") as file:
            content = file.read() if os.path.getsize(path) <= _MOST_READ else b""
        if content[:6] != b"\x7fELF\x02\x01":
            return None
        return _parsed(content)
    except (struct.error, OverflowError, ValueError):  # damaged
        return None


def _parsed(content: bytes) -> _Elf:
    (offset,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    segments = [
        (kind, *struct.unpack_from("<QQQQ", content, at + 8))
        for at in range(offset, offset + size * count, size)
        for (kind,) in [struct.unpack_from("<I", content, at)]
    ]
    interpreter = ""
    needed: tuple[str, ...] = ()
    for kind, start, _address, _physical, length in segments:
        data = content[start : start + length]
        if kind == _SEGMENT_INTERPRETER:
            interpreter = os.fsdecode(data.rstrip(b"\0"))
        elif kind == _SEGMENT_DYNAMIC:
            loads = [(a, o, n) for k, o, a, _p, n in segments if k == _SEGMENT_LOAD]
            needed = tuple(_needed(content, list(struct.iter_unpack("<qQ", data)), loads))
    return _Elf(interpreter, needed)


def _needed(
    content: bytes, entries: list[tuple[int, int]], loads: list[tuple[int, int, int]]
) -> Iterator[str]:
    table = next((value for tag, value in entries if tag == _STRINGS), 0)
    strings = next((o + table - a for a, o, n in loads if a <= table < a + n), None)
    for tag, value in entries:
        if tag == _NEEDED and strings is not None:
            start = strings + value
            yield os.fsdecode(content[start : content.index(b"\0", start)])
