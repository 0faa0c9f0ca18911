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
#: The preloaded libraries. The loader searches them in this order, so the latest version is first.
_PRELOADED = ("libkcache_preload13.so", "libkcache_preload12.so")
_MACHINE = os.uname().machine if sys.platform == "linux" else ""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
#: The type of the entry for the platform in the auxiliary vector; see getauxval(3).
_AT_PLATFORM = 15


_CANT = "kcache can't replace NVRTC here"
_NO_COMPILER = f"{_CANT}: it needs a C compiler at its first use, or a wheel for this platform"


class MissingError(Exception):
    """kcache's libraries can't be used; the message gives the reason."""


def find(environment: Mapping[str, str]) -> str:
    """Return the folder that holds kcache's libraries; build the libraries if there are none.

    Raises:
        MissingError: there are no libraries and none can be built, or another user could change
            them.
        OSError: the folder can't be examined.
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
    """Return the folder that holds kcache's libraries, or None if `find` will build them.

    Raises:
        MissingError, OSError: in the same cases as `find`.
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
    """Return the reason why `kcache run` can't use the cache here, or an empty text if it can."""
    try:
        find_usable(environment)
    except (MissingError, OSError) as error:
        return str(error)
    return ""


def _are_in(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, _MACHINE, _PRELOADED[0]))


def preloaded(folder: str) -> list[str]:
    """Return the paths of the libraries in `folder` that a program has to preload, in order.

    A 32-bit program, or a program with a C library other than glibc, can't load these libraries. In
    a 32-bit program, glibc would print an error. To prevent this error, the paths contain
    `$PLATFORM`, which expands to a folder with an empty library in such a program. musl does not
    expand `$PLATFORM`, finds no file, and prints nothing.

    AddressSanitizer ends a program that loads another library before AddressSanitizer's own,
    because a library that defines `malloc` must not come first. kcache's libraries do not define
    `malloc`. AddressSanitizer recognises its own library by the text `libasan.so` in the path, so
    the returned paths contain `libasan.so/..`. If AddressSanitizer is linked statically, it ends
    the program if the path of a mapped file contains this text. The paths of kcache's mapped files
    do not, because the kernel resolves `..`.

    Raises:
        MissingError: the folder is mounted noexec, or its path has a space, `:` or `$`. The loader
            would print an error in each process; see ld.so(8) on LD_PRELOAD.
        OSError: the folder can't be examined.
    """
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise MissingError(f"no program can preload from {folder}: it is mounted noexec")
    if any(character in folder for character in " :$"):
        raise MissingError(f"no program can preload from {folder}: the path has a space, : or $")
    platform = "$PLATFORM" if _has_platform() else _MACHINE
    return [os.path.join(folder, "libasan.so", "..", platform, name) for name in _PRELOADED]


def for_nvcc(environment: Mapping[str, str], name: str) -> str:
    """Return the path of the file `name`, which is `CLIENT` or `RECORDER`.

    Raises:
        MissingError, OSError: as for `find`.
    """
    return os.path.join(find(environment), _MACHINE, name)


def _has_platform() -> bool:
    """Return whether the kernel passes the name of the platform to programs; gVisor does not."""
    try:
        with open("/proc/self/auxv", "rb") as file:
            vector = memoryview(file.read()).cast("Q")
    except (OSError, TypeError):
        return False
    return _AT_PLATFORM in vector[::2].tolist()


def _own_folder(environment: Mapping[str, str]) -> str:
    """Return the folder, in the user's cache directory, for libraries that are built here.

    Raises:
        MissingError: the user has no home directory.
    """
    home = env.cache_home(environment)
    if home is None:
        raise MissingError(f"{_CANT}: there is no home directory to put its libraries in")
    name = f"{__version__}-{_digest():08x}-{os.uname().machine}"
    return os.path.join(home, "kcache-dropin", name)


def _digest() -> int:
    """Return a checksum of the libraries' sources, which detects edits, but not attacks."""
    digest = 0
    folders = (_SOURCES, _NVCC_SOURCES)
    paths = [os.path.join(folder, name) for folder in folders for name in os.listdir(folder)]
    for path in (*sorted(paths), os.path.join(_SOURCES, "..", "build.py")):
        with open(path, "rb") as file:
            digest = zlib.crc32(file.read(), digest)
    return digest


def _check(folder: str) -> None:
    """Raise an error if another user can change `folder`, because programs load its libraries.

    Raises:
        MissingError: another user can change the folder, a file in it, or a directory above it.
        OSError: the folder can't be examined.
    """
    problem = unsafe_part(os.path.join(folder, _MACHINE))
    for at, _, names in os.walk(os.path.realpath(folder)):
        for path in (at, *(os.path.join(at, name) for name in names)):
            status = os.lstat(path)
            if status.st_uid not in (0, present_user()) or status.st_mode & _OTHERS_WRITE:
                problem = problem or f"others can write to {path}"
    if problem:
        raise MissingError(f"kcache does not load libraries from {folder}: {problem}")
