"""Build: compiles the interface libraries from `native/`, if there is a C compiler.

This module imports nothing of kcache, because the wheel's build hook runs it before anything is
installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

SOURCES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "native")
MAJORS = (12, 13)
#: The values that `$PLATFORM` may have in 64-bit and in 32-bit programs: the platforms that the
#: kernel reports, and `haswell` and `xeon_phi`, which glibc before 2.37 may use in 64-bit programs.
_PLATFORMS = {"x86_64": ("x86_64", "haswell", "xeon_phi")}
_PLATFORMS_32 = {"x86_64": ("i386", "i486", "i586", "i686")}
#: A folder that is needed only for its name: see `libraries.preloaded`.
_ASAN = "libasan.so"
_WHY_ASAN = "AddressSanitizer takes a library for its own if the path has this folder's name.\n"
_FLAGS = ("-std=c11", "-O2", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden", "-shared")
#: The folder of the sources for nvcc, relative to `native/`, and the names of the built files.
_NVCC = os.path.join("..", "..", "nvcc", "native")
CLIENT, RECORDER = "kcache-nvcc", "libkcache_recorder.so"
_NVCC_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden")
_LINK = ("-Wl,-z,defs", "-Wl,-z,relro", "-Wl,-z,now")
_PARTS = {
    "nvrtc": (
        *("nvrtc.c", "program.c", "compile.c", "outputs.c", "about.c"),
        *("bytes.c", "server.c", "real.c"),
    ),
    "preload": ("preload.c", "linked.c", "search.c", os.path.join(_NVCC, "exec.c")),
}
#: A command that runs for longer than this many seconds has failed. A whole build takes 3 seconds.
_TIMEOUT = 300


class BuildError(Exception):
    """The libraries can't be built; the message is the reason."""


class Toolchain(NamedTuple):
    """A C compiler for one machine.

    Attributes:
        machine: what `uname -m` prints on that machine.
        command: compiles 64-bit code.
        command_32: compiles 32-bit code.
    """

    machine: str
    command: Sequence[str]
    command_32: Sequence[str]


def name(major: int, kind: str = "nvrtc") -> str:
    """Return the file name of a library for a major version of NVRTC.

    The kind `nvrtc` is the interface library. The kind `preload` is a library that programs
    preload, and that loads the interface library into them.
    """
    return f"libkcache_{kind}{major}.so"


def compiler() -> str | None:
    """Return the path of a C compiler, or None."""
    return next((found for each in ("cc", "gcc", "clang") if (found := shutil.which(each))), None)


def build(folder: str, *, flags: Sequence[str] = (), toolchain: Toolchain | None = None) -> None:
    """Compile all libraries into a new `folder`. If one can't be compiled, create no folder.

    Args:
        folder: where to put the libraries. If the folder already has files, such as those of
            another build at the same time, they are kept, and the new libraries are deleted.
        flags: further flags for the interface libraries, such as a sanitizer's.
        toolchain: by default, the C compiler of this machine.

    Raises:
        BuildError: there is no compiler, the compiler failed, or a file can't be written.
    """
    if toolchain is None:
        found = compiler()
        if found is None:
            raise BuildError("there is no C compiler (Debian: apt-get install gcc libc6-dev)")
        toolchain = Toolchain(os.uname().machine, (found,), (found, "-m32"))
    parent, own = os.path.split(os.path.abspath(folder))
    temporary = ""
    try:
        temporary = tempfile.mkdtemp(prefix=f"{own}.", dir=parent)
        for command in _commands(temporary, toolchain.machine, flags):
            _run([*toolchain.command, *_FLAGS, *command])
        for command in _commands_for_nvcc(os.path.join(temporary, toolchain.machine)):
            _run([*toolchain.command, *_NVCC_FLAGS, *command])
        _spread(temporary, toolchain)
        with suppress(OSError):  # another build has created the folder first
            os.rename(temporary, folder)
    except OSError as error:
        raise BuildError(f"{folder} can't be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _commands(folder: str, machine: str, flags: Sequence[str]) -> Iterable[list[str]]:
    _make_folder(os.path.join(folder, machine))
    for major in MAJORS:
        for kind, parts in _PARTS.items():
            own = kind == "nvrtc"
            yield [
                *(flags if own else ()),
                *(("-Wl,-z,nodelete", "-lpthread") if own else ()),
                f"-DKCACHE_MAJOR={major}",
                "-o",
                os.path.join(folder, *([] if own else [machine]), name(major, kind)),
                *parts,
                *_LINK,
                f"-Wl,-soname,libnvrtc.so.{major}",
                f"-Wl,--version-script={kind}{major}.map",
                "-ldl",
            ]


def _commands_for_nvcc(folder: str) -> Iterable[list[str]]:
    client = [os.path.join(_NVCC, "client.c"), "server.c", "bytes.c"]
    yield ["-DKCACHE_MAJOR=13", "-o", os.path.join(folder, CLIENT), *client, *_LINK, "-lpthread"]
    recorder = [os.path.join(_NVCC, part) for part in ("recorder.c", "records.c")]
    yield ["-shared", "-o", os.path.join(folder, RECORDER), *recorder, *_LINK, "-ldl"]


def _make_folder(path: str) -> None:
    os.mkdir(path)  # noqa: TID251
    os.chmod(path, 0o700)  # not what the umask leaves


def _spread(folder: str, toolchain: Toolchain) -> None:
    """Make a folder for each value that `$PLATFORM` may have, and the folder `_ASAN`.

    A folder for 64-bit programs gets the preloaded libraries. A folder for 32-bit programs gets
    empty libraries, which these programs load without an error message.
    """
    machine = toolchain.machine
    for platform in _PLATFORMS.get(machine, ())[1:]:
        _make_folder(os.path.join(folder, platform))
        for library in os.listdir(os.path.join(folder, machine)):
            shutil.copy(os.path.join(folder, machine, library), os.path.join(folder, platform))
    for platform in _PLATFORMS_32.get(machine, ()):
        _make_folder(os.path.join(folder, platform))
        for major in MAJORS:
            output = os.path.join(folder, platform, name(major, "preload"))
            empty = ("-nostdlib", "-shared", "-x", "c", os.devnull)
            with suppress(BuildError):  # this compiler has no support for 32 bits
                _run([*toolchain.command_32, *empty, "-o", output])
    _make_folder(os.path.join(folder, _ASAN))
    with open(os.path.join(folder, _ASAN, "README"), "w", encoding="ascii") as file:
        file.write(_WHY_ASAN)


def _run(command: Sequence[str]) -> None:
    """Run a command in the folder of the sources; raise BuildError if the command fails."""
    try:
        subprocess.run(
            command, cwd=SOURCES, check=True, capture_output=True, timeout=_TIMEOUT, text=True
        )
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{command[0]} failed: {error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
