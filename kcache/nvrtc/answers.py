"""Answers: everything but the request that the result of a compile depends on, and its encoding.

They are made from the trace of the compile: everything that the compiler asked the operating
system, with the answers. The result is good as long as every question gets the same answer. So
nothing here knows what an include is. Files that were read, absent paths, directories and variables
are answers like all others.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kcache.errors import CorruptEntryError
from kcache.nvrtc.files import SIZE, PathKind
from kcache.nvrtc.search import ABSOLUTE, Groups, HeaderSearch, RootedPath
from kcache.nvrtc.variables import IN_KEY, WORKING_DIRECTORY

if TYPE_CHECKING:
    from kcache.nvrtc.workers.messages import FileAnswer, Trace

#: What may be at the name of a text in memory.
_UNOPENED = (PathKind.MISSING, PathKind.FILE, PathKind.ERROR)
#: Texts of the compiler itself. It looks for them in the working directory, but never opens them.
_OWN_NAMES = ("__nv_nvrtc_builtin_header.h", "__nv_name_map")
#: Variables of which the key has the values.
_KNOWN = frozenset((*IN_KEY, WORKING_DIRECTORY))

_Group: TypeAlias = tuple["_Kind", int, Sequence[str]]


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
        files: that were read.
        digests: of the contents of the files, one after the other.
        absent: paths at which nothing was.
        present: files that were not opened.
        folders: directories.
        names: of texts in memory, which the compiler looks for on disk and never opens. If one
            exists there, it must not be one of the files, or the compiler takes the two for one.
        same: a number for each path that may be another name of another path's file.
        denied: paths whose stat or open failed, after the errno.
        variables: name and value; None for one that is not set.
        conditions: for the use of the result elsewhere; see `places`.
        home: location of the compile.
    """

    files: Groups
    digests: bytes
    absent: Groups
    present: Groups
    folders: Groups
    names: Groups
    same: list[tuple[int, RootedPath]]
    denied: list[tuple[int, RootedPath]]
    variables: list[tuple[str, str | None]]
    conditions: Sequence[str] = ()
    home: str = ""

    @classmethod
    def of(cls, trace: Trace, search: HeaderSearch) -> Answers:
        """Return the answers in a trace."""
        files: dict[RootedPath, FileAnswer] = {}
        present: dict[RootedPath, FileAnswer] = {}
        absent, folders, names = set[RootedPath](), set[RootedPath](), set[RootedPath]()
        denied: list[tuple[int, RootedPath]] = []
        # Whether a file has the source's own name is checked where the source is asked for.
        source, *headers = search.in_memory()
        named = {*headers, *(search.base + name for name in _OWN_NAMES)}
        for asked, answer in trace.files.items():
            rooted = search.rooted(asked)
            path = search.path(rooted)
            if answer.opened:
                files[rooted] = answer
            elif answer.denied:
                denied.append((answer.error, rooted))
            elif answer.kind in _UNOPENED and path in named:
                names.add(rooted)
            elif answer.kind in _UNOPENED and path == source:
                continue
            elif answer.kind in (PathKind.MISSING, PathKind.NOT_OPENED):
                absent.add(rooted)
            elif answer.kind == PathKind.FILE:
                present[rooted] = answer
            elif answer.kind == PathKind.DIRECTORY and not _is_directory(path, search):
                folders.add(rooted)
        for rooted in files.keys() & present.keys():
            del present[rooted]
        return cls(
            _grouped(files),
            b"".join(files[rooted].digest for rooted in sorted(files)),
            _grouped(absent - files.keys()),
            _grouped(present),
            _grouped(folders.difference(_above((*files, *present)))),
            _grouped(names - files.keys()),
            _same(files, present),
            sorted(denied, key=itemgetter(1)),
            sorted(each for each in trace.variables.items() if each[0] not in _KNOWN),
        )

    def has_names_only(self) -> bool:
        """Return whether the compiler asked for nothing but the names of its texts in memory."""
        others = (self.files, self.absent, self.present, self.folders, self.variables)
        # No file has a name that is too long.
        return not any(others) and all(each == errno.ENAMETOOLONG for each, _ in self.denied)

    def encode(self) -> bytes:
        """Return the encoding of the set; see the description of `manifest`."""
        groups: list[_Group] = [
            *_of_kind(_Kind.READ, self.files),
            *_of_kind(_Kind.ABSENT, self.absent),
            *_of_kind(_Kind.PRESENT, self.present),
            *_of_kind(_Kind.DIRECTORY, self.folders),
            *_of_kind(_Kind.NAME, self.names),
            *((_Kind.SAME, root, (str(number), path)) for number, (root, path) in self.same),
            *((_Kind.DENIED, root, (str(error), path)) for error, (root, path) in self.denied),
            *(
                (_Kind.VARIABLE, 0, (name if value is None else f"{name}={value}",))
                for name, value in self.variables
            ),
            (_Kind.CONDITIONS, 0, self.conditions),
            (_Kind.HOME, 0, (self.home,)),
        ]
        texts = ("\0".join((f"{kind}{root}", *fields)) for kind, root, fields in groups)
        text = "\0\0".join(texts).encode("utf-8", "surrogateescape")
        return struct.pack("<I", len(text)) + text + self.digests

    @classmethod
    def decode(cls, raw: bytes) -> Answers:
        """Return the set in an encoding.

        Raises:
            CorruptEntryError: the encoding is malformed.
        """
        try:
            (length,) = struct.unpack_from("<I", raw)
            text = raw[4 : 4 + length].decode("utf-8", "surrogateescape")
            found: dict[str, Groups] = {kind: [] for kind in _Kind}
            for group in text.split("\0\0"):
                head, *fields = group.split("\0")
                root = int(head[1:])
                if root < ABSOLUTE:
                    raise ValueError(f"root {root}")
                found[head[0]].append((root, fields))
            digests = raw[4 + length :]
            if len(digests) != SIZE * sum(len(paths) for _, paths in found[_Kind.READ]):
                raise ValueError("not one digest per file")
            ((_, conditions),) = found[_Kind.CONDITIONS]
            ((_, (home,)),) = found[_Kind.HOME]
            return cls(
                found[_Kind.READ],
                digests,
                found[_Kind.ABSENT],
                found[_Kind.PRESENT],
                found[_Kind.DIRECTORY],
                found[_Kind.NAME],
                _numbered(found[_Kind.SAME]),
                _numbered(found[_Kind.DENIED]),
                [_variable(text) for _, (text,) in found[_Kind.VARIABLE]],
                conditions,
                home,
            )
        except (struct.error, ValueError, LookupError) as error:
            raise CorruptEntryError(f"malformed dependency set: {error}") from error


def _is_directory(path: str, search: HeaderSearch) -> bool:
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


def identity_of(path: str) -> tuple[int, int] | None:
    """Return device and inode of a file, or None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _above(paths: Iterable[RootedPath]) -> set[RootedPath]:
    """Return the directories of paths below their roots, and the roots: each is there."""
    found: set[RootedPath] = set()
    for root, path in paths:
        folder = RootedPath(root, path.rpartition("/")[0] or ".")
        while folder not in found:
            found |= {folder, RootedPath(root, f"{folder.path}/")}
            folder = RootedPath(root, folder.path.rpartition("/")[0] or ".")
    return found


def _same(
    files: Mapping[RootedPath, FileAnswer], present: Mapping[RootedPath, FileAnswer]
) -> list[tuple[int, RootedPath]]:
    """Return a number for each path that may be another name of another path's file.

    Equal numbers are one file under two names (links), others are not; `#pragma once` goes by that.
    Files of different content are different files. So only files of equal content count, and files
    that were not opened, whose content is unknown.
    """
    inodes = {rooted: each.stamp[3:] for rooted, each in (*files.items(), *present.items())}
    by_inode: dict[tuple[int, ...], list[RootedPath]] = {}
    by_digest: dict[bytes, list[RootedPath]] = {}
    for rooted, inode in inodes.items():
        by_inode.setdefault(inode, []).append(rooted)
    for rooted, each in files.items():
        by_digest.setdefault(each.digest, []).append(rooted)
    doubtful = {each for paths in by_digest.values() if len(paths) > 1 for each in paths}
    for rooted in present:  # in one class with the file that has this other name
        doubtful.update(by_inode[inodes[rooted]])
    numbers: dict[tuple[int, ...], int] = {}
    return [(numbers.setdefault(inodes[each], len(numbers)), each) for each in sorted(doubtful)]


def _grouped(paths: Collection[RootedPath]) -> Groups:
    """Return paths by root."""
    found = groupby(sorted(paths), key=itemgetter(0))
    return [(root, [rooted.path for rooted in group]) for root, group in found]


def _of_kind(kind: _Kind, groups: Groups) -> Iterator[_Group]:
    return ((kind, root, paths) for root, paths in groups)


def _numbered(groups: Groups) -> list[tuple[int, RootedPath]]:
    return [(int(number), RootedPath(root, path)) for root, (number, path) in groups]


def _variable(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    return name, value if equals else None
