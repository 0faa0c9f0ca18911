"""Answers: encodes what the operating system has answered to the compiler in one compile.

The result of a compile depends only on its request and on these answers. They come from the trace
of the compile, which has every question that the compiler asked the operating system, and the
answer. The result is valid as long as every question gets the same answer. For this reason, this
module has no notion of an include: files that were read, absent paths, directories and variables
are all just answers.
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

#: The kinds of answer about a path that the compiler has looked for but has not tried to open. This
#: is how it treats the path of an in-memory text.
_UNOPENED = (PathKind.MISSING, PathKind.FILE, PathKind.ERROR)
#: Names of texts that are built into the compiler. The compiler looks for these names in the
#: working directory, but never opens a file there.
_OWN_NAMES = ("__nv_nvrtc_builtin_header.h", "__nv_name_map")
#: A text of this many bytes or more is compressed. For a PyTorch extension that nvcc compiles, the
#: text has 2 MB.
_LONG_TEXT = 1 << 15
#: Decoding rejects a text that has more bytes than this after decompression.
_MAX_TEXT = 256 << 20

_Group: TypeAlias = tuple["_Kind", int, Sequence[str]]


class _Kind(StrEnum):
    """The kind of a group in the encoding, which the docstring of `manifest` describes."""

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
    """The answers in a dependency set, sorted by kind, and the location of its compile.

    Paths are relative to the roots of the compile; see `RootedPath`.

    Attributes:
        files: files that were read.
        digests: the digests of the contents of `files`, in the same order, one after the other.
        absent: paths that did not exist.
        present: files that existed but were not opened.
        folders: directories that existed.
        names: paths of in-memory texts, which the compiler looks for on disk but never opens. If a
            file exists at such a path, this file must not be one of `files` under another path,
            because the compiler would treat the text and the file as the same.
        same: a number and a path for each file that may have several paths; see the function
            `same`.
        denied: the errno and the path of each failed stat or open, except for absent paths.
        variables: the name and the value of each variable, or None as the value of a variable that
            was not set.
        conditions: the conditions for using the result at another location; see `places`.
        home: the location of the compile; see `Request.location`.
        plain: paths that were not symbolic links. This attribute and the following ones are empty
            for NVRTC, because only nvcc's tools ask such questions.
        links: the target and the path of each symbolic link; the target of a root is its real path.
        access: the mode, whether access was granted, and the path of each call of access(2).
        times: a group, a number and a path for each file that has the same content as another file.
            Such files form a group. In a group, files with equal numbers were modified in the same
            second, and files with different numbers in different seconds. gcc compares this for
            `#pragma once`.
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
        """Return the answers in `trace`, with paths relative to the roots in `search`."""
        files: dict[RootedPath, FileAnswer] = {}
        present: dict[RootedPath, FileAnswer] = {}
        absent, folders, names = set[RootedPath](), set[RootedPath](), set[RootedPath]()
        denied: list[tuple[int, RootedPath]] = []
        # `verification` checks whether a file has the name of the source.
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
        """Return whether the compiler asked for nothing but the names of its in-memory texts."""
        others = (self.files, self.absent, self.present, self.folders, self.variables)
        # A name that is too long may be asked for, too, because no file can ever have such a name.
        return not any(others) and all(each == errno.ENAMETOOLONG for each, _ in self.denied)

    def encode(self) -> bytes:
        """Return the encoding of these answers, which the docstring of `manifest` describes."""
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
        """Return the answers that `raw` encodes.

        Raises:
            CorruptEntryError: `raw` is malformed.
        """
        try:
            (length,) = struct.unpack_from("<I", raw)
            text = text_in(raw).decode("utf-8", "surrogateescape")
            found: dict[str, Groups] = {kind: [] for kind in _Kind}
            for group in text.split("\0\0"):
                head, *fields = group.split("\0")
                root = int(head[1:])
                if root < ABSOLUTE:
                    raise ValueError(f"root: expected at least {ABSOLUTE}, got {root}")
                found[head[0]].append((root, fields))
            digests = raw[4 + length :]
            if len(digests) != SIZE * sum(len(paths) for _, paths in found[_Kind.READ]):
                raise ValueError("the number of digests differs from the number of files")
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
    """Return the text in the encoding `raw`, decompressed if it is compressed.

    Raises:
        ValueError, struct.error: `raw` is malformed.
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
        raise ValueError("its text is either truncated or too long")
    return text


def _is_directory(path: str, search: HeaderSearch) -> bool:
    """Return whether `path` is the working directory of the compile.

    The working directory is not stored as an answer, because every compile has one. `path` may also
    be the value of `PWD`, because LLVM looks that up, too. `PWD` may spell the working directory
    differently, for example with a symbolic link.
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
    """Return the device and the inode of the file at `path`, or None if stat fails."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def above(paths: Iterable[RootedPath]) -> set[RootedPath]:
    """Return the roots of `paths`, and every directory between a root and one of the paths.

    If the paths exist, all these directories exist, too, so there is no need to store them.
    """
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
    """Return a number and the path for each file that may have several paths (by links).

    Paths with equal numbers lead to the same file, and paths with different numbers to different
    files. `#pragma once` depends on that. Files with different contents are certainly different.
    Therefore only files with equal contents are numbered, and files that were not opened, because
    their contents are unknown.

    Args:
        inodes: path -> inode and device, for all files that exist.
        digests: path -> digest of the content, for the files that were read.
    """
    by_inode: dict[Sequence[int], list[RootedPath]] = {}
    for rooted, inode in inodes.items():
        by_inode.setdefault(inode, []).append(rooted)
    doubtful = {each for paths in alike(digests) for each in paths}
    # A file that was not opened under one path may have been read under another path.
    for rooted in inodes.keys() - digests.keys():
        doubtful.update(by_inode[inodes[rooted]])
    numbers: dict[Sequence[int], int] = {}
    return [(numbers.setdefault(inodes[each], len(numbers)), each) for each in sorted(doubtful)]


def alike(digests: Mapping[RootedPath, bytes]) -> list[list[RootedPath]]:
    """Return the groups of two or more paths whose files have equal contents."""
    by_digest: dict[bytes, list[RootedPath]] = {}
    for rooted, digest in digests.items():
        by_digest.setdefault(digest, []).append(rooted)
    return [paths for paths in by_digest.values() if len(paths) > 1]


def grouped(paths: Collection[RootedPath]) -> Groups:
    """Return `paths` grouped by root, in sorted order."""
    found = groupby(sorted(paths), key=itemgetter(0))
    return [(root, [rooted.path for rooted in group]) for root, group in found]


def _of_kind(kind: _Kind, groups: Groups) -> Iterator[_Group]:
    return ((kind, root, paths) for root, paths in groups)


def _numbered(groups: Groups) -> list[tuple[int, RootedPath]]:
    return [(int(number), RootedPath(root, path)) for root, (number, path) in groups]


def _variable(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    return name, value if equals else None
