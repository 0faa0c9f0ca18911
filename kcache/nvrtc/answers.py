"""Answers: everything but the request that the result of a compile depends on, and its encoding.

They come from the trace of the compile: everything that the compiler asked the operating system,
with the answers. The result is valid while every question gets the same answer. So this module has
no notion of an include: files that were read, absent paths, directories and variables are answers
like all others.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kcache import environment
from kcache.errors import CorruptEntryError
from kcache.nvrtc.files import SIZE, PathKind
from kcache.nvrtc.search import ABSOLUTE, Groups, HeaderSearch, RootedPath

if TYPE_CHECKING:
    from kcache.nvrtc.workers.messages import FileAnswer, Trace

#: What may be on disk at the name of an in-memory text.
_UNOPENED = (PathKind.MISSING, PathKind.FILE, PathKind.ERROR)
#: Names of the compiler's own texts. It looks for them in the working directory, and never opens
#: them there.
_OWN_NAMES = ("__nv_nvrtc_builtin_header.h", "__nv_name_map")
#: A longer text is compressed. For nvcc and a PyTorch extension, it has 2 MB.
_LONG_TEXT = 1 << 15
#: Decoding rejects a longer text.
_MAX_TEXT = 256 << 20

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
    PLAIN = "u"
    LINK = "l"
    ACCESS = "m"
    TIME = "t"


class Answers(NamedTuple):
    """The answers in a dependency set by kind, and where it was made; see `manifest`.

    Attributes:
        files: files that were read.
        digests: of the contents of the files, one after the other.
        absent: paths that did not exist.
        present: files that exist and were not opened.
        folders: directories.
        names: names of in-memory texts, which the compiler looks for on disk and never opens. If
            one exists there, it must not be one of the files, because the compiler would treat the
            text and the file as one.
        same: a number and a path for each path whose file may have another path; see `same`.
        denied: errno and path of each path whose stat or open failed.
        variables: name and value; None for a variable that is not set.
        conditions: of the use of the result elsewhere; see `places`.
        home: location of the compile.
        plain: names that were not links. Only nvcc's tools ask for these and for what follows.
        links: where each link leads, and its path; for a root itself, where the root leads.
        access: answers of access(2): the mode, whether it was granted, and the path.
        times: a group, a number and a path for each of several files with equal content. In one
            group, equal numbers mean that the files were modified in the same second; gcc compares
            that for `#pragma once`.
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
    plain: Groups = []  # noqa: RUF012  of a tuple, never changed
    links: Sequence[tuple[RootedPath, RootedPath]] = ()
    access: Sequence[tuple[int, bool, RootedPath]] = ()
    times: Sequence[tuple[int, int, RootedPath]] = ()

    @classmethod
    def of(cls, trace: Trace, search: HeaderSearch) -> Answers:
        """Return the answers in a trace."""
        files: dict[RootedPath, FileAnswer] = {}
        present: dict[RootedPath, FileAnswer] = {}
        absent, folders, names = set[RootedPath](), set[RootedPath](), set[RootedPath]()
        denied: list[tuple[int, RootedPath]] = []
        # A file with the name of the source is checked for by `verification`.
        source, *headers = search.in_memory()
        named = {*headers, *(search.base + name for name in _OWN_NAMES)}
        in_key = (*environment.IN_KEY, environment.WORKING_DIRECTORY)
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
        present = {rooted: each for rooted, each in present.items() if rooted not in files}
        return cls(
            grouped(files),
            b"".join(files[rooted].digest for rooted in sorted(files)),
            grouped(absent - files.keys()),
            grouped(present),
            grouped(folders.difference(above((*files, *present)))),
            grouped(names - files.keys()),
            same(
                {rooted: each.stamp[3:] for rooted, each in (files | present).items()},
                {rooted: each.digest for rooted, each in files.items()},
            ),
            sorted(denied, key=itemgetter(1)),
            sorted(each for each in trace.variables.items() if each[0] not in in_key),
        )

    def has_names_only(self) -> bool:
        """Return whether the compiler asked only for the names of its in-memory texts."""
        others = (self.files, self.absent, self.present, self.folders, self.variables)
        # No file can have a name that is too long.
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
            *_of_kind(_Kind.PLAIN, self.plain),
            *((_Kind.LINK, root, (str(to.root), to.path, path)) for to, (root, path) in self.links),
            *(
                (_Kind.ACCESS, root, (str(mode), str(int(granted)), path))
                for mode, granted, (root, path) in self.access
            ),
            *(
                (_Kind.TIME, root, (str(group), str(number), path))
                for group, number, (root, path) in self.times
            ),
            (_Kind.CONDITIONS, 0, self.conditions),
            (_Kind.HOME, 0, (self.home,)),
        ]
        texts = ("\0".join((f"{kind}{root}", *fields)) for kind, root, fields in groups)
        text = "\0\0".join(texts).encode("utf-8", "surrogateescape")
        text = text if len(text) < _LONG_TEXT else zlib.compress(text, 1)
        return struct.pack("<I", len(text)) + text + self.digests

    @classmethod
    def decode(cls, raw: bytes) -> Answers:
        """Return the set in an encoding.

        Raises:
            CorruptEntryError: the encoding is malformed.
        """
        try:
            (length,) = struct.unpack_from("<I", raw)
            text = text_in(raw).decode("utf-8", "surrogateescape")
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
                found[_Kind.PLAIN],
                [
                    (RootedPath(int(to), target), RootedPath(root, path))
                    for root, (to, target, path) in found[_Kind.LINK]
                ],
                [
                    (int(mode), granted == "1", RootedPath(root, path))
                    for root, (mode, granted, path) in found[_Kind.ACCESS]
                ],
                [
                    (int(group), int(number), RootedPath(root, path))
                    for root, (group, number, path) in found[_Kind.TIME]
                ],
            )
        except (struct.error, ValueError, LookupError) as error:
            raise CorruptEntryError(f"malformed dependency set: {error}") from error


def text_in(raw: bytes) -> bytes:
    """Return the text of an encoding.

    Raises:
        ValueError, struct.error: the encoding is malformed.
    """
    (length,) = struct.unpack_from("<I", raw)
    text = raw[4 : 4 + length]
    if text[:2] != zlib.compress(b"", 1)[:2]:  # no group begins with these bytes
        return text
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(text, _MAX_TEXT)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not unpacker.eof:
        raise ValueError("its text is cut, or too long")
    return text


def _is_directory(path: str, search: HeaderSearch) -> bool:
    """Return whether a path is the working directory, which exists wherever a compile runs.

    LLVM also asks for the directory as `PWD` spells it.
    """
    path = _bare(path)
    if path == search.directory:
        return True
    spelled = _bare(search.variable(environment.WORKING_DIRECTORY) or "")
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


def above(paths: Iterable[RootedPath]) -> set[RootedPath]:
    """Return the directories of existing paths below their roots, and the roots: all exist."""
    found: set[RootedPath] = set()
    for root, path in paths:
        folder = RootedPath(root, path.rpartition("/")[0] or ".")
        while folder not in found:
            found |= {folder, RootedPath(root, f"{folder.path}/")}
            folder = RootedPath(root, folder.path.rpartition("/")[0] or ".")
    return found


def same(
    inodes: Mapping[RootedPath, Sequence[int]], digests: Mapping[RootedPath, bytes]
) -> list[tuple[int, RootedPath]]:
    """Return a number for each path whose file may also have another path.

    Paths with equal numbers are one file (links); paths with different numbers are different files.
    `#pragma once` depends on that. Files of different content are different files. So only files of
    equal content are numbered, and files that were not opened, whose content is unknown.
    """
    by_inode: dict[Sequence[int], list[RootedPath]] = {}
    for rooted, inode in inodes.items():
        by_inode.setdefault(inode, []).append(rooted)
    doubtful = {each for paths in alike(digests) for each in paths}
    # A file that was not opened under this path may have been read under another one.
    for rooted in inodes.keys() - digests.keys():
        doubtful.update(by_inode[inodes[rooted]])
    numbers: dict[Sequence[int], int] = {}
    return [(numbers.setdefault(inodes[each], len(numbers)), each) for each in sorted(doubtful)]


def alike(digests: Mapping[RootedPath, bytes]) -> list[list[RootedPath]]:
    """Return the groups of files that have equal content."""
    by_digest: dict[bytes, list[RootedPath]] = {}
    for rooted, digest in digests.items():
        by_digest.setdefault(digest, []).append(rooted)
    return [paths for paths in by_digest.values() if len(paths) > 1]


def grouped(paths: Collection[RootedPath]) -> Groups:
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
