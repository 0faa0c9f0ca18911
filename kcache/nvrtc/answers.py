"""Answers: everything but the request that the result of a compile depends on, and its encoding.

It is made from the trace of the compile: everything that the compiler asked the operating system,
with the answers. The result is good as long as every question gets the same answer. So nothing here
knows what an include is. Files that were read, absent paths, directories and variables are answers
like all others.
"""

from __future__ import annotations

import errno
import itertools
import os
import struct
from collections.abc import Iterable, Iterator
from enum import StrEnum
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from kcache.errors import CorruptEntryError
from kcache.nvrtc.files import SIZE, PathKind
from kcache.nvrtc.search import ABSOLUTE, HeaderSearch, RootedPath
from kcache.nvrtc.variables import WORKING_DIRECTORY

if TYPE_CHECKING:
    from kcache.nvrtc.workers.messages import Trace

#: What may be at the name of a text in memory.
_UNOPENED = (PathKind.MISSING, PathKind.FILE, PathKind.ERROR)
#: Texts of the compiler itself. It looks for them in the working directory, but never opens them.
_OWN_NAMES = ("__nv_nvrtc_builtin_header.h", "__nv_name_map")


class _Kind(StrEnum):
    """The kind of a group in the encoding; see `manifest`."""

    READ = "f"
    ABSENT = "a"
    PRESENT = "p"
    DIRECTORY = "d"
    NAME = "n"
    SAME = "i"
    DENIED = "e"
    VARIABLE = "v"
    CONDITIONS = "c"
    HOME = "x"


class Answers(NamedTuple):
    """The answers in a dependency set by kind, and where it was made; see `manifest`.

    Attributes:
        files: that were read, by root.
        absent: paths at which nothing was, by root.
        present: files that were not opened.
        folders: directories.
        names: of texts in memory, which the compiler looks for on disk.
        same: a number for each path that may be another name of another path's file.
        denied: paths whose stat or open failed, after the errno.
        variables: name and value; None for one that is not set.
        conditions: for the use of the result elsewhere; see `places`.
        home: location of the compile.
        digests_at: position of the files' digests in the encoding.
        roots: how many roots a request needs at least.
    """

    files: list[tuple[int, list[str]]]
    absent: list[tuple[int, list[str]]]
    present: list[RootedPath]
    folders: list[RootedPath]
    names: list[RootedPath]
    same: list[tuple[int, RootedPath]]
    denied: list[tuple[int, RootedPath]]
    variables: list[tuple[str, str | None]]
    conditions: list[str]
    home: str
    digests_at: int
    roots: int


def only_names(trace: Trace, search: HeaderSearch) -> bool:
    """Return whether a compile asked for no file but the names of texts that it has in memory.

    It opens none of these, but checks whether two of them are one file.
    """
    named = _names(search)
    there = 0
    for asked, answer in trace.files.items():
        path = search.path(search.rooted(asked))
        if answer.kind == PathKind.DIRECTORY and is_directory(path, search):
            continue
        denied = answer.denied and answer.error != errno.ENAMETOOLONG  # no file has such a name
        if path not in named or answer.kind not in _UNOPENED or answer.opened or denied:
            return False
        there += answer.kind == PathKind.FILE
    return there <= 1


def _names(search: HeaderSearch) -> frozenset[str]:
    """Return the paths at which the compiler looks for the names of texts that it has in memory."""
    return frozenset((*search.in_memory(), *(search.base + name for name in _OWN_NAMES)))


def is_directory(path: str, search: HeaderSearch) -> bool:
    """Return whether a path is the working directory, which exists wherever a compile runs.

    LLVM also asks for it in the spelling of `PWD`.
    """
    path = _bare(path)
    if path == search.directory:
        return True
    spelled = _bare(search.variable(WORKING_DIRECTORY) or "")
    return path == spelled and identity_of(path) == identity_of(search.directory) is not None


def _bare(path: str) -> str:
    while path.endswith(("/", "/.")) and len(path) > 1:
        path = path.removesuffix(".").removesuffix("/") or "/"
    return path


def _above(rooted: RootedPath) -> Iterator[RootedPath]:
    """Yield the directories of a path below its root, and the root itself."""
    folder = rooted.path
    while "/" in folder:
        folder = folder.rpartition("/")[0]
        yield RootedPath(rooted.root, folder)
        yield RootedPath(rooted.root, f"{folder}/")
    yield RootedPath(rooted.root, ".")


def identity_of(path: str) -> tuple[int, int] | None:
    """Return device and inode of a file, or None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


# -- the encoding ----------------------------------------------------------------------------------


def encode(
    trace: Trace,
    search: HeaderSearch,
    variables: Iterable[tuple[str, str | None]] = (),
    *,
    conditions: Iterable[str] = (),
    home: str = "",
) -> bytes:
    """Return the encoding of the set that a trace makes; see the description of `manifest`.

    Args:
        trace: of the compile.
        search: its roots.
        variables: those that the compiler asked for and that are not part of the key; None for one
            that is not set.
        conditions: for the use of the result elsewhere; see `places`.
        home: location of the compile (`Request.location`).
    """
    answers = _Traced(trace, search)
    groups = [
        *_groups(_Kind.READ, answers.files),
        *_groups(_Kind.ABSENT, answers.absent - answers.files.keys()),
        *_groups(_Kind.PRESENT, answers.present - answers.files.keys()),
        *_groups(_Kind.DIRECTORY, answers.directories - answers.implied()),
        *_groups(_Kind.NAME, answers.names - answers.files.keys()),
        *(_group(_Kind.SAME, path.root, str(n), path.path) for n, path in answers.same()),
        *(_group(_Kind.DENIED, path.root, str(n), path.path) for path, n in sorted(answers.denied)),
        *(
            _group(_Kind.VARIABLE, 0, name if value is None else f"{name}={value}")
            for name, value in sorted(variables, key=_first)
        ),
        _group(_Kind.CONDITIONS, 0, *conditions),
        _group(_Kind.HOME, 0, home),
    ]
    text = "\0\0".join(groups).encode("utf-8", "surrogateescape")
    digests = (answers.files[rooted] for rooted in sorted(answers.files))
    return struct.pack("<I", len(text)) + text + b"".join(digests)


_first = itemgetter(0)


class _Traced:
    """The answers in a trace, by kind.

    Attributes:
        files: files that were read, path -> digest of the content (XXH3-128, 16 bytes).
        absent: paths at which nothing was.
        present: files of which nothing was read.
        directories: directories.
        names: of in-memory texts, which the compiler looks for on disk and never opens. If one
            exists there, it must not be one of the files, or the compiler takes the two for one.
        denied: paths whose stat or open failed, and the errno.
    """

    def __init__(self, trace: Trace, search: HeaderSearch) -> None:
        self.files: dict[RootedPath, bytes] = {}
        self.absent: set[RootedPath] = set()
        self.present: set[RootedPath] = set()
        self.directories: set[RootedPath] = set()
        self.names: set[RootedPath] = set()
        self.denied: list[tuple[RootedPath, int]] = []
        self._inodes: dict[RootedPath, tuple[int, ...]] = {}
        named = _names(search)
        # Whether a file has the source's own name is checked where the source is asked for.
        source, *others = search.in_memory()
        own = {source} - {*others}
        for path, answer in trace.files.items():
            rooted = search.rooted(path)
            if answer.opened:
                self.files[rooted] = answer.digest
                self._inodes[rooted] = answer.stamp[3:]
            elif answer.denied:
                self.denied.append((rooted, answer.error))
            elif answer.kind in _UNOPENED and search.path(rooted) in named:
                if search.path(rooted) not in own:
                    self.names.add(rooted)
            elif answer.kind in (PathKind.MISSING, PathKind.NOT_OPENED):
                self.absent.add(rooted)
            elif answer.kind == PathKind.FILE:
                self.present.add(rooted)
                self._inodes[rooted] = answer.stamp[3:]
            elif answer.kind == PathKind.DIRECTORY and not is_directory(
                search.path(rooted), search
            ):
                self.directories.add(rooted)

    def implied(self) -> set[RootedPath]:
        """Return the directories that are there because something in them is."""
        return {folder for each in (*self.files, *self.present) for folder in _above(each)}

    def same(self) -> Iterator[tuple[int, RootedPath]]:
        """Yield a number for each path that may be another name of another path's file.

        Equal numbers are one file under two names (links), others are not; `#pragma once` goes by
        that. Files of different content are different files. So only files of equal content count,
        and files that were not opened, whose content is unknown.
        """
        inodes = self._inodes
        by_inode: dict[tuple[int, ...], list[RootedPath]] = {}
        by_digest: dict[bytes, list[RootedPath]] = {}
        for rooted in sorted(inodes):
            by_inode.setdefault(inodes[rooted], []).append(rooted)
            if rooted in self.files:
                by_digest.setdefault(self.files[rooted], []).append(rooted)
        doubtful = {each for paths in by_digest.values() if len(paths) > 1 for each in paths}
        for rooted in inodes:
            if rooted not in self.files:  # in one class with the file that has this other name
                doubtful.update(by_inode[inodes[rooted]])
        numbers: dict[tuple[int, ...], int] = {}
        for rooted in sorted(doubtful):
            yield numbers.setdefault(inodes[rooted], len(numbers)), rooted


def _group(kind: _Kind, root: int, *fields: str) -> str:
    return "\0".join((f"{kind}{root}", *fields))


def _groups(kind: _Kind, paths: Iterable[RootedPath]) -> Iterator[str]:
    """Yield the text of each root's paths."""
    for root, group in itertools.groupby(sorted(paths), key=_first):
        yield _group(kind, root, *(rooted.path for rooted in group))


def decode(raw: bytes) -> Answers:
    """Return the set in an encoding, by kind.

    Raises:
        CorruptEntryError: the encoding is malformed.
    """
    try:
        (length,) = struct.unpack_from("<I", raw)
        text = raw[4 : 4 + length].decode("utf-8", "surrogateescape")
        found: dict[str, list[tuple[int, list[str]]]] = {kind: [] for kind in _Kind}
        roots = 0
        for group in text.split("\0\0") if text else ():
            head, *fields = group.split("\0")
            root = int(head[1:])
            if root < ABSOLUTE:
                raise ValueError(f"root {root}")
            roots = max(roots, root + 1)
            found[head[0]].append((root, fields))
        count = sum(len(paths) for _, paths in found[_Kind.READ])
        if len(raw) != 4 + length + SIZE * count:
            raise ValueError("not one digest per file")
        ((_, conditions),) = found[_Kind.CONDITIONS]
        ((_, (home,)),) = found[_Kind.HOME]
        return Answers(
            found[_Kind.READ],
            found[_Kind.ABSENT],
            list(each_path(found[_Kind.PRESENT])),
            list(each_path(found[_Kind.DIRECTORY])),
            list(each_path(found[_Kind.NAME])),
            [(int(number), RootedPath(root, path)) for root, (number, path) in found[_Kind.SAME]],
            [(int(error), RootedPath(root, path)) for root, (error, path) in found[_Kind.DENIED]],
            [_variable(text) for _, (text,) in found[_Kind.VARIABLE]],
            conditions,
            home,
            4 + length,
            roots,
        )
    except (struct.error, ValueError, KeyError, IndexError) as error:
        raise CorruptEntryError(f"malformed dependency set: {error}") from error


def each_path(groups: Iterable[tuple[int, list[str]]]) -> Iterator[RootedPath]:
    """Yield every path of several roots."""
    return (RootedPath(root, path) for root, paths in groups for path in paths)


def _variable(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    return name, value if equals else None
