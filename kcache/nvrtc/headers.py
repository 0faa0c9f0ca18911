"""Headers: everything but the request that the result of a compile depends on.

It is made from the trace of the compile: everything that the compiler asked the operating system,
with the answers. The outcome is good as long as every question gets the same answer. So nothing
here knows what an include is. Files that were read, absent paths, directories and variables are
answers like all others.
"""

from __future__ import annotations

import errno
import itertools
import os
import struct
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from kcache.errors import CorruptEntryError
from kcache.nvrtc.files import SIZE
from kcache.nvrtc.search import ABSOLUTE, HeaderSearch, RootedPath
from kcache.nvrtc.variables import WORKING_DIRECTORY

if TYPE_CHECKING:
    from kcache.nvrtc.workers.messages import Trace

#: Texts of the compiler itself. It looks for them in the working directory, but never opens them.
_OWN_NAMES = ("__nv_nvrtc_builtin_header.h", "__nv_name_map")


class Sections(NamedTuple):
    """A dependency set as it is stored, by kind and root; see `manifest` for the encoding."""

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
    """Tell whether a compile asked for no file but the names of texts that it has in memory.

    It opens none of these, but checks whether two of them are one file.
    """
    named = _names(search)
    there = 0
    for asked, answer in trace.files.items():
        path = search.path(search.rooted(asked))
        if answer.kind == "d" and is_directory(path, search):
            continue
        denied = answer.denied and answer.error != errno.ENAMETOOLONG  # no file has such a name
        if path not in named or answer.kind not in "-fe" or answer.opened or denied:
            return False
        there += answer.kind == "f"
    return there <= 1


def is_header(path: str) -> bool:
    """Tell whether there is a readable file at `path`, links followed."""
    return os.path.isfile(path) and os.access(path, os.R_OK)


def _names(search: HeaderSearch) -> frozenset[str]:
    """Return the paths at which the compiler looks for the names of texts that it has in memory."""
    return frozenset((*search.in_memory(), *(search.base + name for name in _OWN_NAMES)))


def is_directory(path: str, search: HeaderSearch) -> bool:
    """Tell whether a path is the working directory, which exists wherever a compile runs.

    LLVM also asks for it in the spelling of `PWD`.
    """
    path = _bare(path)
    if path == search.directory:
        return True
    spelled = _bare(search.variable(WORKING_DIRECTORY) or "")
    return path == spelled and _identity(path) == _identity(search.directory) is not None


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


def confused_names(names: Iterable[str], source: str, files: Iterable[str]) -> Iterator[str]:
    """Yield names of in-memory texts that lead to a file which also exists under another name.

    The compiler takes the two for one.

    Args:
        names: those that the compiler has looked for.
        source: the present name of the source; it may have been compiled under another name.
        files: those that were read.
    """
    own = tuple(names)
    there = {path: file for path in dict.fromkeys((*own, source)) if (file := _identity(path))}
    if not there:
        return
    read = [(path, _identity(path)) for path in files]
    for name, file in there.items():
        others = (path for path in there if path != name)
        if any(there[path] == file for path in others) or any(
            each == file and (path != name or name not in own) for path, each in read
        ):
            yield name


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def same_identities(once: Iterable[tuple[int, RootedPath]], search: HeaderSearch) -> bool:
    """Tell whether equal numbers are one file, and different numbers different files."""
    files: dict[int, tuple[int, int]] = {}
    for number, rooted in once:
        file = _identity(search.path(rooted))
        if file is None or files.setdefault(number, file) != file:
            return False
    return len(set(files.values())) == len(files)


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
    answers = _Answers(trace, search)
    groups = [
        *_groups("f", answers.files),
        *_groups("a", answers.kinds["-"] - answers.files.keys()),
        *_groups("p", answers.kinds["f"] - answers.files.keys()),
        *_groups("d", answers.kinds["d"] - answers.implied()),
        *_groups("n", answers.kinds["n"] - answers.files.keys()),
        *(f"i{rooted.root}\0{number}\0{rooted.path}" for number, rooted in answers.same()),
        *(f"e{rooted.root}\0{error}\0{rooted.path}" for rooted, error in sorted(answers.denied)),
        *(f"v0\0{n}" if v is None else f"v0\0{n}={v}" for n, v in sorted(variables, key=_first)),
        "\0".join(("c0", *conditions)),
        f"x0\0{home}",
    ]
    text = "\0\0".join(groups).encode("utf-8", "surrogateescape")
    digests = (answers.files[rooted] for rooted in sorted(answers.files))
    return struct.pack("<I", len(text)) + text + b"".join(digests)


_first = itemgetter(0)


class _Answers:
    """The answers in a trace, by kind.

    Attributes:
        files: files that were read, path -> digest of the content (XXH3-128, 16 bytes).
        kinds: other paths. `-` nothing was there; `f` a file of which nothing was read; `d` a
            directory; `n` names of in-memory texts, which the compiler looks for on disk and never
            opens. If one exists there, it must not be one of the files, or the compiler takes the
            two for one.
        denied: paths whose stat or open failed, and the errno.
    """

    def __init__(self, trace: Trace, search: HeaderSearch) -> None:
        self.files: dict[RootedPath, bytes] = {}
        self.kinds: dict[str, set[RootedPath]] = {kind: set() for kind in "-fdn"}
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
            elif answer.kind in "-f" and search.path(rooted) in named:
                if search.path(rooted) not in own:
                    self.kinds["n"].add(rooted)
            elif answer.kind == "d" and is_directory(search.path(rooted), search):
                pass
            elif answer.kind in "-afd":
                self.kinds["-" if answer.kind == "a" else answer.kind].add(rooted)
                if answer.kind == "f":
                    self._inodes[rooted] = answer.stamp[3:]

    def implied(self) -> set[RootedPath]:
        """Return the directories that are there because something in them is."""
        return {folder for each in (*self.files, *self.kinds["f"]) for folder in _above(each)}

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


def _groups(kind: str, paths: Iterable[RootedPath]) -> Iterator[str]:
    """Yield the text of each root's paths."""
    for root, group in itertools.groupby(sorted(paths), key=_first):
        yield "\0".join((f"{kind}{root}", *(rooted.path for rooted in group)))


def decode(raw: bytes) -> Sections:
    """Return the set in an encoding, by kind.

    Raises:
        CorruptEntryError: the encoding is none.
    """
    try:
        (length,) = struct.unpack_from("<I", raw)
        text = raw[4 : 4 + length].decode("utf-8", "surrogateescape")
        found: dict[str, list[tuple[int, list[str]]]] = {kind: [] for kind in "fapdnievcx"}
        roots = 0
        for group in text.split("\0\0") if text else ():
            head, *fields = group.split("\0")
            root = int(head[1:])
            if root < ABSOLUTE:
                raise ValueError(f"root {root}")
            roots = max(roots, root + 1)
            found[head[0]].append((root, fields))
        count = sum(len(paths) for _, paths in found["f"])
        if len(raw) != 4 + length + SIZE * count:
            raise ValueError("not one digest per file")
        ((_, conditions),) = found["c"]
        ((_, (home,)),) = found["x"]
        return Sections(
            found["f"],
            found["a"],
            list(each_path(found["p"])),
            list(each_path(found["d"])),
            list(each_path(found["n"])),
            [(int(number), RootedPath(root, path)) for root, (number, path) in found["i"]],
            [(int(error), RootedPath(root, path)) for root, (error, path) in found["e"]],
            [_variable(text) for _, (text,) in found["v"]],
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
