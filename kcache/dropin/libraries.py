"""Libraries: finds the interface libraries, and builds them if the wheel has none."""

from __future__ import annotations

import os
import stat
import sys
import zlib

from kcache._version import __version__
from kcache.dropin import environment as env

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MissingError", "find", "find_built", "preloaded"]

_PACKAGED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib")
_SOURCES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "native")
_PRELOADED = ("libkcache_preload.so", "libkcache_linked13.so", "libkcache_linked12.so")


class MissingError(Exception):
    """There are no interface libraries, and none can be built; the message says what is missing."""


def find(environment: Mapping[str, str]) -> str:
    """Return the folder of the libraries; build them if the wheel has none.

    Raises:
        MissingError: there are none, and none can be built.
    """
    folder = find_built(environment)
    if folder is not None:
        return folder
    from kcache.dropin.build import BuildError, build  # builds are rare

    folder = _own_folder(environment)
    base = os.path.dirname(folder)
    try:
        os.makedirs(base, mode=0o700, exist_ok=True)
        _check_private(base)
        build(folder, extra=_newer_functions())
        _check_private(folder)
    except (OSError, BuildError) as error:
        raise MissingError(
            f"there are no interface libraries, nor can they be built: {error}"
        ) from (error)
    return folder


def find_built(environment: Mapping[str, str]) -> str | None:
    """Return the folder of libraries that exist already, or None; change nothing.

    Raises:
        MissingError: there can't be any here.
    """
    if sys.platform != "linux":
        raise MissingError("the drop-in needs Linux")
    named = environment.get(env.LIBRARIES) or _PACKAGED
    if os.path.isfile(os.path.join(named, _PRELOADED[0])):
        return named
    folder = _own_folder(environment)
    if not os.path.isfile(os.path.join(folder, _PRELOADED[0])):
        return None
    _check_private(folder)
    return folder


def preloaded(folder: str) -> list[str]:
    """Return the paths that a program has to preload, in order.

    Raises:
        MissingError: the loader would refuse their paths, or misread them, and complain in each
            process; see ld.so(8) on LD_PRELOAD.
    """
    folder = os.path.abspath(folder)
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise MissingError(f"no program can preload from {folder}: it is mounted noexec")
    if any(character in folder for character in " :$"):
        raise MissingError(f"no program can preload from {folder}: it has a space, a colon or a $")
    return [os.path.join(folder, name) for name in _PRELOADED]


def _own_folder(environment: Mapping[str, str]) -> str:
    home = env.cache_home(environment)
    if home is None:
        raise MissingError(
            "this installation has no interface libraries, and there is no home directory for them"
        )
    name = f"{__version__}-{_digest():08x}-{os.uname().machine}"
    return os.path.join(home, "kcache-dropin", name)


def _newer_functions() -> dict[int, set[str]]:
    """Return the functions of the installed NVRTC that the table lacks, by its major version."""
    from kcache.dropin.build import MAJORS, unknown_exports
    from kcache.nvrtc import library

    found = library.find()
    if found is None:
        return {}
    name = os.path.basename(found.path)
    majors = [major for major in MAJORS if name.startswith(f"libnvrtc.so.{major}")]
    return {major: unknown_exports(found.path) for major in majors}


def _digest() -> int:
    """Return a number that differs if the sources differ; it detects edits, not attacks."""
    digest = 0
    for name in (*sorted(os.listdir(_SOURCES)), "../build.py"):
        with open(os.path.join(_SOURCES, name), "rb") as file:
            digest = zlib.crc32(file.read(), digest)
    return digest


def _check_private(folder: str) -> None:
    """Refuse a folder that another user can write to, because every program loads its libraries."""
    status = os.stat(folder)
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise MissingError(f"others can write to {folder}, so kcache loads nothing from it")
