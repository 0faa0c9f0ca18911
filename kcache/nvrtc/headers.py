"""HeaderSet: the files that decided a compile's outcome.

Three things decide what a source with includes compiles to, beside the source: the content of the
headers that were read; files that were looked for and are *not* there, because one that appears
earlier on the include path, or makes a `__has_include` true, changes the outcome; and files that
are there and make a `__has_include` true without being read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from kcache.errors import KcacheError
from kcache.nvrtc.search import Place

__all__ = ["HeaderSet", "UncacheableError", "is_header", "tree_files"]


class HeaderSet(NamedTuple):
    """The files that decided one outcome, each in its place.

    Attributes:
        files: place -> digest of the content (XXH3-128, 16 bytes).
        absent: places where there must be no file.
        present: places where there must be a file, whatever is in it.
        trees: roots that must hold no other files than `files` lists.
        once: files of equal content with `#pragma once`, each with a number: equal numbers must be
            one file under two names (links), others must not be.
        paths: whether the outcome holds the paths themselves (`__FILE__`), so that it is good for
            these include directories only.
    """

    files: Mapping[Place, bytes]
    absent: frozenset[Place]
    present: frozenset[Place]
    trees: frozenset[int] = frozenset()
    once: tuple[tuple[int, Place], ...] = ()
    paths: bool = False


class UncacheableError(KcacheError):
    """A compile's outcome must not be cached; the message says why. Never reaches a caller.

    Attributes:
        covered_by_extra_key: whether a caller's `extra_key` takes responsibility for the reason.
    """

    def __init__(self, reason: str, *, covered_by_extra_key: bool = False) -> None:
        super().__init__(reason)
        self.covered_by_extra_key = covered_by_extra_key


def tree_files(top: str, most: int) -> list[str] | None:
    """Return the paths below `top` of all files in it, links followed; None if more than `most`."""
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(top, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        paths = (os.path.join(folder, name) for name in names)
        found += (os.path.relpath(path, top) for path in paths if is_header(path))
        if len(found) > most:
            return None
    return found


def is_header(path: str) -> bool:
    """Tell whether the compiler would open `path` as a header: a readable file, links followed."""
    return os.path.isfile(path) and os.access(path, os.R_OK)
