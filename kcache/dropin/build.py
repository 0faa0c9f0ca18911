"""Build: compiles the interface libraries from `native/`, where there is a C compiler.

Imports nothing of kcache: the wheel's build hook runs this file before anything is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress

__all__ = ["BuildError", "build", "compiler", "names"]

SOURCES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "native")
MAJORS = (12, 13)
#: The hook first: `dlopen` has to be found in it.
HOOK = "libkcache_preload.so"
_FLAGS = ("-std=c11", "-O2", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden", "-shared")
_LINK = ("-Wl,-z,defs", "-Wl,-z,relro", "-Wl,-z,now")
_PARTS = ("nvrtc.c", "bytes.c", "answers.c", "server.c", "real.c")
#: Seconds; it takes 3.
_TIMEOUT = 300


class BuildError(Exception):
    """The libraries can't be built; the message says why."""


def names() -> list[str]:
    """Return the names of all libraries."""
    return [HOOK, *(name(major, kind) for major in MAJORS for kind in ("nvrtc", "linked"))]


def name(major: int, kind: str) -> str:
    """Return the name of one: `nvrtc` answers, `linked` is for programs linked with NVRTC."""
    return f"libkcache_{kind}{major}.so"


def compiler() -> str | None:
    """Return the path of a C compiler, or None."""
    return next((found for each in ("cc", "gcc", "clang") if (found := shutil.which(each))), None)


def build(folder: str, *, extra: Iterable[str] = (), flags: Sequence[str] = ()) -> None:
    """Compile all libraries into `folder`, which is made, whole or not at all.

    Args:
        folder: where they go; left as it is if it exists.
        extra: functions that a newer NVRTC exports beyond those that `native/table.h` has.
        flags: further flags for the compiler, such as a sanitizer's.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    found = compiler()
    if found is None:
        raise BuildError("there is no C compiler (Debian: apt-get install gcc libc6-dev)")
    temporary = f"{folder}.{os.getpid()}"
    try:
        os.makedirs(temporary, mode=0o700)
        more = _extra(temporary, extra)
        for command in _commands(temporary):
            _run([found, *_FLAGS, *flags, *more, *command])
        with suppress(OSError):  # another process was faster
            os.rename(temporary, folder)
    except OSError as error:
        raise BuildError(f"{folder} can't be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _commands(folder: str) -> Iterable[list[str]]:
    yield ["-o", os.path.join(folder, HOOK), "preload.c", *_LINK, "-ldl"]
    for major in MAJORS:
        for kind, parts, more in (
            ("nvrtc", _PARTS, ["-Wl,-z,nodelete", "-ldl", "-lpthread"]),
            ("linked", ("linked.c",), ["-ldl"]),
        ):
            yield [
                f"-DKCACHE_MAJOR={major}",
                "-o",
                os.path.join(folder, name(major, kind)),
                *parts,
                *_LINK,
                f"-Wl,-soname,libnvrtc.so.{major}",
                f"-Wl,--version-script={kind}{major}.map",
                *more,
            ]


def _extra(folder: str, functions: Iterable[str]) -> list[str]:
    """Write `extra.h`, the functions that are only forwarded; return the flags that use it."""
    listed = " ".join(f"X({function})" for function in sorted(set(functions)))
    if not listed:
        return []
    with open(os.path.join(folder, "extra.h"), "w", encoding="ascii") as file:
        file.write(f"#define KD_EXTRA(X) {listed}\n")
    return ["-DKCACHE_EXTRA", f"-I{folder}"]


def _run(command: Sequence[str]) -> None:
    try:
        subprocess.run(
            command, cwd=SOURCES, check=True, capture_output=True, timeout=_TIMEOUT, text=True
        )
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{command[0]} failed: {error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
