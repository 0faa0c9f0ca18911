"""Known: keeps version and architectures of NVRTC builds in small files, to ask only once.

A program asks for them before its first compile. Loading the library for the answer would take 100
ms. The same build always gives the same answer.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from typing import cast

from kcache.util.open_file import open_own

__all__ = ["Release", "recall", "remember"]

#: (version, architectures).
Release = tuple[tuple[int, int], tuple[int, ...]]
_MOST = 64
_MOST_BYTES = 4096


def recall(folder: str | None, identity: str) -> Release | None:
    """Return what was remembered about a build, or None; a damaged file counts as none."""
    if folder is None:
        return None
    try:
        file = open_own(_path(folder, identity), os.O_RDONLY)
        found: object = json.loads(os.read(file.fd, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, list):
        return None
    numbers = cast("list[object]", found)
    if not 3 <= len(numbers) <= _MOST or not all(type(each) is int for each in numbers):
        return None
    major, minor, *archs = cast("list[int]", numbers)
    return (major, minor), tuple(archs)


def remember(folder: str | None, identity: str, about: Release) -> None:
    """Remember version and architectures of a build, if that is possible."""
    if folder is None:
        return
    path = _path(folder, identity)
    temporary = f"{path}.{os.getpid()}"
    with suppress(OSError):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with open(temporary, "x", encoding="ascii") as file:
            json.dump([*about[0], *about[1]], file)
        os.rename(temporary, path)


def _path(folder: str, identity: str) -> str:
    digest = hashlib.sha256(identity.encode(), usedforsecurity=False).hexdigest()
    return os.path.join(folder, f"nvrtc-{digest[:32]}.json")
