"""HeaderSet: what decided a compile's outcome, beside its request.

It is made of the compile's record: all that the compiler asked the operating system, with the
answers. The outcome is good as long as every question gets the answer that it got. So nothing here
knows what an include is; files that were read, places where nothing was, directories and variables
are answers like all others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from kcache.nvrtc.search import SOURCE, HeaderSearch, Place

if TYPE_CHECKING:
    from kcache.nvrtc.workers.messages import Record

__all__ = ["FREE", "Denied", "HeaderSet", "Other", "is_header", "only_names"]

#: `HeaderSet.bound` of an outcome that is good wherever the include directories lie.
FREE = ""
#: The compiler's own texts, which it looks for in the working directory and never opens.
_OWN_NAMES = ("__nv_nvrtc_builtin_header.h", "__nv_name_map")


class Denied(NamedTuple):
    """A path that could not be looked at, or not opened, and the error's number."""

    place: Place
    error: int


class Other(NamedTuple):
    """The answer to one of the rarer questions; see `recorder`."""

    question: str
    place: Place
    answer: bytes


class HeaderSet(NamedTuple):
    """What one compile was told.

    Attributes:
        files: files that were read, place -> digest of the content (XXH3-128, 16 bytes).
        absent: places where nothing was.
        present: files that were there, and that nothing was read of.
        folders: places where a directory was.
        names: names of in-memory texts, which the compiler looks for on disk and never opens; one
            that is there must be none of the files, or the compiler takes the two for one.
        same: paths of equal content, each with a number: equal numbers are one file under two names
            (links), others are not. `#pragma once` goes by that.
        denied: what could not be looked at or opened.
        others: answers to rarer questions.
        variables: environment variables that are not part of the key, None for one that is not set.
        bound: where the outcome is good: `FREE`, or a digest of the location that it was made in,
            with `!` before it where it is known to be good for no other.
    """

    files: Mapping[Place, bytes]
    absent: frozenset[Place] = frozenset()
    present: frozenset[Place] = frozenset()
    folders: frozenset[Place] = frozenset()
    names: frozenset[Place] = frozenset()
    same: tuple[tuple[int, Place], ...] = ()
    denied: tuple[Denied, ...] = ()
    others: tuple[Other, ...] = ()
    variables: tuple[tuple[str, str | None], ...] = ()
    bound: str = FREE

    @classmethod
    def of(
        cls,
        record: Record,
        search: HeaderSearch,
        texts: Iterable[str],
        variables: Iterable[tuple[str, str | None]],
    ) -> HeaderSet:
        """Return the set that a record makes.

        Args:
            record: of the compile.
            search: its roots.
            texts: names of the source and of the in-memory headers.
            variables: those that were asked for and are not part of the key.
        """
        named = _names(texts, search)
        kinds: dict[str, set[Place]] = {kind: set() for kind in "-fdn"}
        files: dict[Place, bytes] = {}
        denied: list[Denied] = []
        inodes: dict[Place, tuple[int, int]] = {}
        for path, answer in record.files.items():
            place = search.place(path)
            if answer.opened:
                files[place] = answer.digest
                inodes[place] = answer.stamp[3:]
            elif answer.denied:
                denied.append(Denied(place, answer.error))
            elif answer.kind in "-f" and search.path(place) in named:
                kinds["n"].add(place)
            elif answer.kind == "d" and _is_directory(search.path(place), search):
                pass
            elif answer.kind in "-afd":
                kinds["-" if answer.kind == "a" else answer.kind].add(place)
                if answer.kind == "f":
                    inodes[place] = answer.stamp[3:]
        implied = {folder for place in (*files, *kinds["f"]) for folder in _above(place)}
        return cls(
            files,
            frozenset(kinds["-"] - files.keys()),
            frozenset(kinds["f"] - files.keys()),
            frozenset(kinds["d"] - implied),
            frozenset(kinds["n"] - files.keys()),
            tuple(_same(files, inodes)),
            tuple(sorted(denied)),
            tuple(
                sorted(
                    Other(question, search.place(path), answer)
                    for (question, path), answer in record.others.items()
                )
            ),
            tuple(sorted(variables, key=lambda pair: pair[0])),
        )


def only_names(record: Record, search: HeaderSearch, texts: Iterable[str]) -> bool:
    """Tell whether a compile asked for no file but the names of texts that it has in memory.

    It opens none of these; it wants to know whether two of them are one file.
    """
    named = _names(texts, search)
    there = 0
    for path, answer in record.files.items():
        place = search.place(path)
        absolute = search.path(place)
        if answer.kind == "d" and _is_directory(absolute, search):
            continue
        # Whether the source's directory is there decides how messages spell it, which the log
        # shows for a name that is part of the key; no other output depends on it.
        if place == (SOURCE, ".") and answer.kind in "-d":
            continue
        if absolute not in named or answer.kind not in "-f" or answer.opened or answer.denied:
            return False
        there += answer.kind == "f"
    return there <= 1 and not record.others


def is_header(path: str) -> bool:
    """Tell whether there is a readable file at `path`, links followed."""
    return os.path.isfile(path) and os.access(path, os.R_OK)


def _names(texts: Iterable[str], search: HeaderSearch) -> frozenset[str]:
    """Return the paths at which the compiler looks for the names of texts that it has in memory."""
    return frozenset(
        name if name[:1] == "/" else search.base + name for name in (*texts, *_OWN_NAMES)
    )


def _is_directory(path: str, search: HeaderSearch) -> bool:
    """Tell whether a path is the working directory, which is one wherever a compile is made."""
    while path.endswith(("/", "/.")) and len(path) > 1:
        path = path.removesuffix(".").removesuffix("/") or "/"
    return path == search.directory


def _above(place: Place) -> Iterator[Place]:
    """Yield the directories that a path goes through, below its root, and the root itself."""
    folder = place.path
    while "/" in folder:
        folder = folder.rpartition("/")[0]
        yield Place(place.root, folder)
        yield Place(place.root, f"{folder}/")
    yield Place(place.root, ".")


def _same(
    files: Mapping[Place, bytes], inodes: Mapping[Place, tuple[int, int]]
) -> Iterator[tuple[int, Place]]:
    """Yield a number for each path that may be another name of another path's file.

    Files of different content are different files, so only those of equal content count, and those
    that were not opened, whose content is not known.
    """
    by_inode: dict[tuple[int, int], list[Place]] = {}
    by_digest: dict[bytes, list[Place]] = {}
    for place in sorted(inodes):
        by_inode.setdefault(inodes[place], []).append(place)
        if place in files:
            by_digest.setdefault(files[place], []).append(place)
    doubtful = {place for places in by_digest.values() if len(places) > 1 for place in places}
    for place in inodes:
        if place not in files:  # one class with the file whose other name it is
            doubtful.update(by_inode[inodes[place]])
    numbers: dict[tuple[int, int], int] = {}
    for place in sorted(doubtful):
        yield numbers.setdefault(inodes[place], len(numbers)), place
