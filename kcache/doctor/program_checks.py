"""ProgramChecks: whether `kcache run` can answer a program's NVRTC calls, and if not, why.

What a program does with NVRTC shows only when it runs. But its file shows whether it is set-uid,
linked statically, or linked with another C library than kcache's libraries.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator

from kcache.doctor import OK, PROBLEM, WARNING, Finding
from kcache.dropin import libraries
from kcache.dropin import run_environment as env
from kcache.nvrtc import library

_TOPIC = "kcache run"
#: Prints whether a program that opens the library at `sys.argv[1]` gets kcache's library.
_PROBE = """
import ctypes, sys
handle = ctypes.CDLL(sys.argv[1])
print(hasattr(handle, "kcache_dropin_load"))
"""
_TIMEOUT = 30
_INSTALL = "Install a C compiler (Debian: apt-get install gcc libc6-dev), or a wheel for Linux."
#: Linux follows so many first lines of scripts, and reads so many bytes of each (fs/exec.c).
_MOST_SCRIPTS, _MOST_LINE = 5, 256


def diagnose() -> Iterator[Finding]:
    """Yield whether kcache's libraries exist, and whether they answer in place of NVRTC."""
    found = library.find()
    try:
        folder = libraries.find_usable(env.current())
        problem = _probe(folder, found.path) if folder and found else ""
    except (libraries.MissingError, OSError, subprocess.TimeoutExpired) as error:
        yield Finding(WARNING, _TOPIC, str(error), _INSTALL)
        return
    if problem:
        do = "Programs that load it run as they do without kcache. A newer kcache may reach them."
        yield Finding(WARNING, _TOPIC, f"NVRTC is not reached: {problem}", do)
    elif folder is None:
        yield Finding(OK, _TOPIC, "the first use will compile kcache's libraries")
    else:
        yield Finding(OK, _TOPIC, "programs that load NVRTC are reached")


def missing() -> str:
    """Return why no program can be served here, or empty."""
    try:
        libraries.find_usable(env.current())
    except (libraries.MissingError, OSError) as error:
        return str(error)
    return ""


def _probe(folder: str, path: str) -> str:
    """Return why a program that opens the library at `path` gets the real one, or empty.

    Raises:
        MissingError, OSError, TimeoutExpired: no program could be started.
    """
    variables = {**env.current()}
    variables |= env.of_dropin(variables, libraries.preloaded(folder), "/nonexistent")
    command = [sys.executable, "-I", "-c", _PROBE, path]
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=_TIMEOUT, check=False
    )
    if done.stdout.strip() == "True":
        return ""
    errors = done.stderr.strip().splitlines()
    return errors[-1] if errors else "it has functions that this version of kcache does not know"


# -- one program -----------------------------------------------------------------------------------


def diagnose_program(name: str) -> Iterator[Finding]:
    """Yield whether `kcache run` would reach a program, as far as its file shows."""
    path = shutil.which(name)
    if path is None or not os.path.isfile(path):
        what = f"there is no program {name}"
        yield Finding(PROBLEM, _TOPIC, what, "Name a program or its path.")
        return
    path = os.path.realpath(path)
    try:
        runs = _what_runs(path)
        what = path if runs in (path, None) else f"{path} (run by {runs})"
        reached, clause = _reach(runs) if runs else (False, "its first line names no program")
    except OSError as error:
        what, reached, clause = path, False, f"it can't be read: {error.strerror}"
    problem = missing()
    if reached and problem:
        yield Finding(WARNING, _TOPIC, f"{what} is not reached: {problem}", _INSTALL)
    elif reached:
        yield Finding(OK, _TOPIC, f"{what} is reached{clause}")
    else:
        do = "It runs under `kcache run` as it does without."
        yield Finding(WARNING, _TOPIC, f"{what} is not reached: {clause}", do)


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


def _reach(path: str) -> tuple[bool, str]:
    """Return whether `kcache run` reaches an executable file, and how or why not.

    This process's loader (`ld.so --list`) runs nothing of the program.
    """
    if os.stat(path).st_mode & (stat.S_ISUID | stat.S_ISGID):
        return False, "it is set-uid or set-gid, so the loader takes nothing into it"
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        loader = re.search(r"/\S*/ld-linux\S*", maps.read())
    if loader is None:
        return False, "this Python has another loader than glibc's"
    command = [loader[0], "--list", path]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT, check=False
    )
    if done.returncode != 0 or "statically linked" in done.stdout:
        reason = done.stderr.strip().rpartition("shared libraries: ")[2]
        return False, f"glibc does not load it: {reason}" if reason else "it is linked statically"
    linked = re.search(r"libnvrtc\.so\S*", done.stdout)
    return True, f"; it is linked with {linked[0]}" if linked else ", if it loads NVRTC"
