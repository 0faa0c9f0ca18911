"""Libraries: finds the interface libraries, and builds them if the wheel has none."""

from __future__ import annotations

import os
import stat
import sys
import zlib

from kcache._version import __version__
from kcache.dropin import run_environment as env
from kcache.util.forks import importing
from kcache.util.path_safety import make_private, present_user, unsafe_part

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_PACKAGED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib")
_SOURCES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "native")
_NVCC_SOURCES = os.path.join(os.path.dirname(os.path.dirname(_SOURCES)), "nvcc", "native")
#: The program that is started in place of nvcc, and the library that nvcc's tools preload.
CLIENT, RECORDER = "kcache-nvcc", "libkcache_recorder.so"
#: The loader searches them in this order, so the latest version is first.
_PRELOADED = ("libkcache_preload13.so", "libkcache_preload12.so")
_MACHINE = os.uname().machine if sys.platform == "linux" else ""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
#: The type of the entry for the platform in the auxiliary vector; see getauxval(3).
_AT_PLATFORM = 15


_CANT = "kcache can't answer NVRTC here"
_NO_COMPILER = f"{_CANT}: it needs a C compiler for its first use, or a wheel for this platform"


class MissingError(Exception):
    """kcache's libraries do not exist and can't be built; the message names what is missing."""


def find(environment: Mapping[str, str]) -> str:
    """Return the folder of the libraries; build them if the wheel has none.

    Raises:
        MissingError: there are none, and none can be built.
    """
    folder = find_usable(environment)
    if folder is not None:
        return folder
    with importing:
        from kcache.dropin.build import BuildError, build  # noqa: PLC0415  8 ms

    folder = _own_folder(environment)
    try:
        _check(folder)
        make_private(os.path.dirname(folder))
        build(folder)
        _check(folder)
    except (OSError, BuildError) as error:
        raise MissingError(f"{_CANT}: {error}") from error
    return folder


def find_usable(environment: Mapping[str, str]) -> str | None:
    """Return the folder of the libraries, or None if the first use will build them.

    Raises:
        MissingError: there are none, and none can be built.
    """
    if sys.platform != "linux":
        raise MissingError("`kcache run` and `kcache.install` need Linux")
    named = environment.get(env.LIBRARIES)
    if not named and _are_in(_PACKAGED):
        return _PACKAGED  # as safe as this module, so it needs no check
    folder = os.path.abspath(named) if named else ""
    if not folder or not _are_in(folder):
        folder = _own_folder(environment)
    if _are_in(folder):
        _check(folder)
        return folder
    with importing:
        from kcache.dropin.build import compiler  # noqa: PLC0415  8 ms

    if compiler() is None:
        raise MissingError(_NO_COMPILER)
    return None


def problem(environment: Mapping[str, str]) -> str:
    """Return why `kcache run` can answer no program here, or an empty text."""
    try:
        find_usable(environment)
    except (MissingError, OSError) as error:
        return str(error)
    return ""


def _are_in(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, _MACHINE, _PRELOADED[0]))


def preloaded(folder: str) -> list[str]:
    """Return the paths that a program has to preload, in order.

    A program for 32 bits, or with another C library than glibc, can't load kcache's libraries. In
    a program for 32 bits, glibc would print an error, but `$PLATFORM` leads it to an empty library.
    musl does not expand `$PLATFORM`. It finds no file, and prints nothing.

    AddressSanitizer ends a program if another library is loaded before its own, because no library
    with a `malloc` may come first. kcache's libraries have no `malloc`. AddressSanitizer finds its
    own library by the text `libasan.so` in the loader's path, so the returned paths have the detour
    `libasan.so/..`. If AddressSanitizer is linked into the program statically, it ends the program
    if a mapped file has this text in its path. That is not the case: the kernel resolves `..`.

    Raises:
        MissingError: the loader would refuse or misread these paths, and print an error in each
            process; see ld.so(8) on LD_PRELOAD.
    """
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise MissingError(f"no program can preload from {folder}: it is mounted noexec")
    if any(character in folder for character in " :$"):
        raise MissingError(f"no program can preload from {folder}: the path has a space, : or $")
    platform = "$PLATFORM" if _has_platform() else _MACHINE
    return [os.path.join(folder, "libasan.so", "..", platform, name) for name in _PRELOADED]


def for_nvcc(environment: Mapping[str, str], name: str) -> str:
    """Return the path of `CLIENT` or `RECORDER`; raises MissingError."""
    return os.path.join(find(environment), _MACHINE, name)


def _has_platform() -> bool:
    """Return whether the kernel tells each program its platform; gVisor does not."""
    try:
        with open("/proc/self/auxv", "rb") as file:
            vector = memoryview(file.read()).cast("Q")
    except (OSError, TypeError):
        return False
    return _AT_PLATFORM in vector[::2].tolist()


def _own_folder(environment: Mapping[str, str]) -> str:
    """Return the folder for libraries that are built here.

    Raises:
        MissingError: the user has no home.
    """
    home = env.cache_home(environment)
    if home is None:
        raise MissingError(f"{_CANT}: there is no home directory for its libraries")
    name = f"{__version__}-{_digest():08x}-{os.uname().machine}"
    return os.path.join(home, "kcache-dropin", name)


def _digest() -> int:
    """Return a number that differs if the sources differ; it detects edits, not attacks."""
    digest = 0
    folders = (_SOURCES, _NVCC_SOURCES)
    paths = [os.path.join(folder, name) for folder in folders for name in os.listdir(folder)]
    for path in (*sorted(paths), os.path.join(_SOURCES, "..", "build.py")):
        with open(path, "rb") as file:
            digest = zlib.crc32(file.read(), digest)
    return digest


def _check(folder: str) -> None:
    """Refuse a folder that another user can change, because every program loads its libraries.

    Raises:
        MissingError: another user can change it; OSError: it can't be examined.
    """
    problem = unsafe_part(os.path.join(folder, _MACHINE))
    for at, _, names in os.walk(os.path.realpath(folder)):
        for path in (at, *(os.path.join(at, name) for name in names)):
            status = os.lstat(path)
            if status.st_uid not in (0, present_user()) or status.st_mode & _OTHERS_WRITE:
                problem = problem or f"others can write to {path}"
    if problem:
        raise MissingError(f"kcache loads nothing from {folder}: {problem}")
