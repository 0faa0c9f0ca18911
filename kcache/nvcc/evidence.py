"""Evidence: what one compile of nvcc depended on, and whether that holds in a place now.

It is the questions that the tools asked the operating system, with the answers. Paths are as
`Roots.rooted` returns them, so that the evidence can be checked in another place.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from kcache.errors import CorruptEntryError
from kcache.nvrtc.files import NO_STAMP, FileDigests, Stamp, is_fresh, stamp_of

if TYPE_CHECKING:
    from kcache.nvcc.request import Request, Roots

#: Decoding refuses more. CUB has 0.3 MB, a PyTorch extension 2 MB.
_MAX_BYTES = 256 << 20
_KINDS = {stat.S_IFREG: "f", stat.S_IFDIR: "d", stat.S_IFLNK: "l"}


class Evidence(NamedTuple):
    """Questions and answers. Immutable.

    Attributes:
        files: paths of the files that were read, tools and libraries included.
        digests: theirs, 16 bytes each, one after the other.
        twins: groups of different files with equal content: their numbers, and for each the place
            in the group of the first one with its mtime. `#pragma once` compares the seconds.
        folders: existing directory -> (names below it where nothing was; names that were there and
            were no links).
        present: path -> kind of what was asked for and not read, and a number that is equal for
            paths of one inode.
        access: (path, mode, whether it was granted), as access(2).
        links: link -> where it leads.
        roots: for each root, the path that it resolves to.
        variables: name -> digest of the value, empty for a variable that was not set.
        shown: number -> path of a root that the artifact shows: it is good only there.
    """

    files: Sequence[str]
    digests: bytes
    twins: Sequence[tuple[Sequence[int], Sequence[int]]]
    folders: Mapping[str, tuple[Sequence[str], Sequence[str]]]
    present: Mapping[str, tuple[str, int]]
    access: Sequence[tuple[str, int, bool]]
    links: Mapping[str, str]
    roots: Sequence[str]
    variables: Mapping[str, str]
    shown: Mapping[str, str]

    def encode(self) -> bytes:
        """Return the evidence as bytes."""
        fields = {**self._asdict(), "digests": self.digests.hex()}
        return zlib.compress(json.dumps(fields, separators=(",", ":")).encode(), 1)

    @classmethod
    def decode(cls, raw: bytes) -> Evidence:
        """Return the evidence in bytes.

        Raises:
            CorruptEntryError: they are none.
        """
        try:
            unpacker = zlib.decompressobj()
            text = unpacker.decompress(raw, _MAX_BYTES)
            fields: dict[str, Any] = json.loads(text)
            made = cls(**{**fields, "digests": bytes.fromhex(fields["digests"])})
            sizes_agree = len(made.digests) == 16 * len(made.files)
        except (zlib.error, ValueError, TypeError, LookupError, RecursionError) as error:
            raise CorruptEntryError(f"no evidence of nvcc: {error}") from error
        if not sizes_agree or not all(map(cls._is_sound, made)):
            raise CorruptEntryError("no evidence of nvcc")
        return made

    @staticmethod
    def _is_sound(field: object) -> bool:
        return isinstance(field, (dict, list, bytes))


def variable(request: Request, name: str) -> str:
    """Return the digest of a variable of a request, empty if it is not set."""
    value = request.environment.get(name)
    if value is None:
        return ""
    return xxhash.xxh3_128_hexdigest(os.fsencode(request.roots.numbered(value)))


class Check:
    """Whether evidence holds for one set of roots; it remembers what was verified.

    Threads: safe to share; what is remembered is replaced, not changed.

    Args:
        evidence: what to check.
        roots: where; raises LookupError if the evidence has others.
    """

    def __init__(self, evidence: Evidence, roots: Roots) -> None:
        self._evidence = evidence
        self._roots = roots
        absolute = roots.absolute
        self.files = [*map(absolute, evidence.files)]
        self._folders = {absolute(path): names for path, names in evidence.folders.items()}
        self._present = [(absolute(path), *kind) for path, kind in evidence.present.items()]
        self._access = [(absolute(path), mode, ok) for path, mode, ok in evidence.access]
        self._links = [(absolute(path), target) for path, target in evidence.links.items()]
        self._stamps: Sequence[Stamp] = [NO_STAMP] * len(self.files)
        self._watched: dict[str, Stamp] = {}

    def difference(self, request: Request, digests: FileDigests) -> str | None:
        """Return the first difference between evidence and present, or None if it holds."""
        return next(self._differences(request, digests), None)

    def _differences(self, request: Request, digests: FileDigests) -> Iterator[str]:
        evidence = self._evidence
        for number, path in evidence.shown.items():
            if self._roots.paths[int(number)] != path:
                yield f"the files show the directory {path}"
        for name, digest in evidence.variables.items():
            if variable(request, name) != digest:
                yield f"the variable {name} changed"
        verified: list[Stamp] = []
        for path in digests.differing(self.files, evidence.digests, self._stamps, verified):
            yield f"the file {path} changed"
        self._stamps = verified
        yield from self._other_folders(digests)
        yield from self._other_answers()

    def _other_folders(self, digests: FileDigests) -> Iterator[str]:
        """Yield names that appeared, or became links, by the stamps of their directories."""
        now = digests.clock()
        for folder, (missing, plain) in self._folders.items():
            try:
                stamp = stamp_of(os.stat(folder))
            except OSError:
                yield f"the directory {folder} changed"
                continue
            if self._watched.get(folder) == stamp:
                continue
            lasts = True
            for name in missing:
                if os.path.lexists(f"{folder}/{name}"):
                    yield f"the file {folder}/{name} appeared"
                # Below an existing name, things change without a trace in this directory.
                lasts = lasts and ("/" not in name or not os.path.lexists(_first(folder, name)))
            for name in plain:
                if os.path.islink(f"{folder}/{name}"):
                    yield f"{folder}/{name} became a link"
            if lasts and not is_fresh(stamp, now):
                self._watched[folder] = stamp

    def _other_answers(self) -> Iterator[str]:
        inodes: dict[int, tuple[int, int]] = {}
        for path, kind, number in self._present:
            try:
                status = os.stat(path) if kind != "l" else os.lstat(path)
            except OSError:
                yield f"the file {path} changed"
                continue
            inode = status.st_dev, status.st_ino
            if kind_of(status.st_mode) != kind or inodes.setdefault(number, inode) != inode:
                yield f"the file {path} changed"
        if len(set(inodes.values())) != len(inodes):
            yield "two files are one now"
        for path, mode, granted in self._access:
            if os.access(path, mode) != granted:
                yield f"the rights of {path} changed"
        for path, target in self._links:
            try:
                if self._roots.rooted(os.readlink(path)) != target:
                    yield f"the link {path} changed"
            except OSError:
                yield f"the link {path} changed"
        if [*map(self.resolved, self._roots.paths)] != [*self._evidence.roots]:
            yield "the links on the way to the directories changed"
        for numbers, pattern in self._evidence.twins:
            if times_of(self.files[number] for number in numbers) != pattern:
                yield "the times of two equal files changed"

    def resolved(self, root: str) -> str:
        """Return where a root leads, in the form of `Evidence.roots`."""
        return self._roots.rooted(os.path.realpath(root))


def times_of(paths: Iterable[str]) -> list[int]:
    """Return for each file the place of the first one with its mtime in seconds."""
    times = [int(os.stat(path).st_mtime) for path in paths]
    return [times.index(each) for each in times]


def kind_of(mode: int) -> str:
    """Return the letter of a kind of file, as the recorder writes it."""
    return _KINDS.get(stat.S_IFMT(mode), "o")


def _first(folder: str, name: str) -> str:
    return f"{folder}/{name.partition('/')[0]}"
