"""Manifest: the header sets that one request has had so far, and how to check them.

Stored as an entry under the request's key. Sections: `set0`, `set1`, ... the header sets, most
recent first; `stamps0.LOCATION` what `FileDigests` remembered of set 0's files where the include
directories lie as LOCATION says.

A set is a u32 length, a text of that length, and 16 bytes of digest per file that was read. The
text is groups separated by two NULs; a group is a KIND and a root's number, then fields separated
by NULs. Kinds whose fields are paths below the root: ``f`` files that were read, ``a`` absent,
``p`` present and not opened, ``d`` directories, ``n`` names of in-memory texts. Others: ``i`` a
number and one path: paths with equal numbers are one file, others are not; ``e`` an error's number
and a path; ``o`` a question, a path, and the answer in hexadecimal; ``v`` (root 0) a variable,
``NAME=VALUE`` or ``NAME`` for one that is not set; ``c`` (root 0) what the source has to be called,
if that matters, with one of `headers.CALLED` before it; ``x`` (root 0) what the outcome is bound
to, see `HeaderSet.bound`, and what a proof came to: ``+`` it is good everywhere, ``-`` it is not,
or nothing. ``x`` comes last. The key of a kernel is made of its set without what a proof came to.

Stamps are five signed 64-bit integers (`Stamp`), zeros for what is not trusted: first one per
file; then a u32 count of directories, their stamps, and their absolute paths separated by NULs.
Everything is little-endian.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from kcache.entry import Entry
from kcache.errors import CorruptEntryError
from kcache.nvrtc.answers import answer_now, error_now
from kcache.nvrtc.files import (
    NO_STAMP,
    SIZE,
    FileDigests,
    ReadOnly,
    Stamp,
    Watched,
    file_clock_ns,
    stamp_of,
    watched_from,
)
from kcache.nvrtc.headers import (
    HeaderSet,
    Sections,
    confused_names,
    decode,
    encode,
    is_header,
    same_identities,
)
from kcache.nvrtc.key import digest_fields
from kcache.nvrtc.search import ABSOLUTE, HeaderSearch, RootedPath

__all__ = ["MAX_LOCATIONS", "MAX_SETS", "Difference", "Manifest", "StoredHeaderSet"]

#: How many header sets a request keeps. If there are more, the least recently stored one is
#: forgotten.
MAX_SETS = 16
#: For how many places a set keeps stamps: checkouts and containers that share a cache.
MAX_LOCATIONS = 4

_STAMP = struct.Struct("<5q")
#: Stands before a location in `HeaderSet.bound` if the outcome is known to be good nowhere else.
ONLY = "!"
#: Stands after it if the outcome may depend on how the include directories are spelled.
NAMED = "n"
#: The result of a proof: the outcome is good everywhere, or it is not.
GOOD, BAD = "+", "-"


class Difference(NamedTuple):
    """One difference between a header set and the present state.

    Attributes:
        kind: `changed` or `gone`, of a header that was read; `appeared`, of something that was not
            there; `vanished`, of something that was; `identity`, of files that became one, or two;
            `root`, of a set that is for another include path; `variable`, of an environment
            variable; `answer`, of a rarer question to the file system; `called`, of a source that
            has another name.
        path: absolute path of the file, or name of the variable or the source; empty where no
            single one is meant.
    """

    kind: str
    path: str


class StoredHeaderSet:
    """One header set of a request, with the stamps of its files.

    It is made from the set's canonical encoding, which is decoded when it is first needed. Threads:
    safe to share; stamps are replaced, not changed.

    Attributes:
        raw: the encoding; the result's key is made of it.
        stamps: location -> encoded stamps.
    """

    __slots__ = ("_directories", "_paths", "_sections", "raw", "stamps")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.stamps: dict[str, bytes] = {}
        self._sections: Sections | None = None
        #: location -> absolute paths of the headers.
        self._paths: dict[str, tuple[str, ...]] = {}
        #: location -> what the last check for absent files in this process found.
        self._directories: dict[str, dict[str, Watched]] = {}

    @classmethod
    def of(cls, headers: HeaderSet) -> StoredHeaderSet:
        """Return a new header set as it is stored."""
        return cls(encode(headers))

    def sections(self) -> Sections:
        """Return the set by kind.

        Raises:
            CorruptEntryError: the encoding is none.
        """
        if self._sections is None:
            self._sections = decode(self.raw)
        return self._sections

    def dependencies(self, search: HeaderSearch, location: str) -> tuple[str, ...]:
        """Return the absolute paths of the headers, sorted; one tuple per location."""
        found = self._paths.get(location)
        if found is None:
            paths = (path for _, group in self._files(search) for path in group)
            found = self._paths[location] = tuple(sorted(paths))
        return found

    @property
    def bound(self) -> str:
        """Where the outcome is good; see `HeaderSet.bound`."""
        return self.sections().bound

    def good_at(self, location: str) -> bool:
        """Tell whether the outcome may be used where the include directories lie as given."""
        if self.sections().proof == GOOD:
            return True
        return location.startswith(self.bound.removeprefix(ONLY).removesuffix(NAMED))

    @property
    def may_be_good_elsewhere(self) -> bool:
        """Whether the outcome may depend on its location, and nothing has shown that it does."""
        sections = self.sections()
        return bool(sections.bound) and not (sections.bound.startswith(ONLY) or sections.proof)

    @property
    def is_refuted(self) -> bool:
        """Whether a proof has shown that the outcome is good for its location alone."""
        return self.sections().proof == BAD

    def unbound(self) -> StoredHeaderSet:
        """Return the same answers, without the location that the outcome is bound to."""
        return StoredHeaderSet(self._with_last("", unless="c"))

    def judged(self, *, good: bool) -> StoredHeaderSet:
        """Return the same set with the verdict of a proof."""
        judged = StoredHeaderSet(self._with_last(f"x0\0{self.bound}\0{GOOD if good else BAD}"))
        judged.stamps = dict(self.stamps)
        return judged

    def result_key(self, request_key: str) -> str:
        """Return the key of the outcome: the request, and the answers that the compiler got."""
        sections = self.sections()
        raw = self._with_last(f"x0\0{sections.bound}") if sections.proof else self.raw
        fields = [("request", request_key.encode()), ("headers", raw)]
        return digest_fields("kcache-result/3", fields)

    def _with_last(self, group: str, *, unless: str = "") -> bytes:
        """Return the encoding with another group ``x``, or none; and without the kinds `unless`."""
        sections = self.sections()
        groups = self.raw[4 : sections.digests_at].split(b"\0\0")
        kept = [each for each in groups if each[:1] not in (b"x", *map(str.encode, unless))]
        text = b"\0\0".join(filter(None, (*kept, group.encode())))
        return struct.pack("<I", len(text)) + text + self.raw[sections.digests_at :]

    def holds(
        self, search: HeaderSearch, digests: FileDigests, location: str, *, proven: bool = False
    ) -> bool:
        """Tell whether every file is now as the set says; see `differences`."""
        return next(self.differences(search, digests, location, proven=proven), None) is None

    def differences(
        self, search: HeaderSearch, digests: FileDigests, location: str, *, proven: bool = False
    ) -> Iterator[Difference]:
        """Yield the differences from the set, those first that are cheapest to find.

        With `proven`, it assumes what a proof could show.
        """
        sections = self.sections()
        if sections.roots > len(search.roots):
            yield Difference("root", "")
            return
        if sections.called and not sections.is_called(
            search.source_name, proven=proven or sections.proof == GOOD
        ):
            yield Difference("called", sections.called[1:])
        stamps = iter(self._stored(location))
        for at, paths in self._files(search):
            for path in digests.differing(paths, self.raw, at, stamps):
                yield Difference("changed" if is_header(path) else "gone", path)
        yield from self._appeared(search, digests, location)
        if sections.same and not same_identities(sections.same, search):
            yield Difference("identity", "")
        for path in map(search.path, sections.present):
            if not is_header(path):
                yield Difference("vanished", path)
        for path in map(search.path, sections.folders):
            if not os.path.isdir(path):
                yield Difference("vanished", path)
        files = (path for _, paths in self._files(search) for path in paths)
        for path in confused_names(map(search.path, sections.names), search.source(), files):
            yield Difference("identity", path)
        yield from self._other_answers(sections, search)

    @staticmethod
    def _other_answers(sections: Sections, search: HeaderSearch) -> Iterator[Difference]:
        for error, rooted in sections.denied:
            if error_now(search.path(rooted)) != error:
                yield Difference("answer", search.path(rooted))
        for question, rooted, answer in sections.others:
            if answer_now(question, search.path(rooted)) != answer:
                yield Difference("answer", search.path(rooted))
        for name, value in sections.variables:
            if search.variable(name) != value:
                yield Difference("variable", name)

    def _files(self, search: HeaderSearch) -> Iterator[tuple[int, list[str]]]:
        """Yield absolute paths of the headers that were read, and where their digests begin."""
        sections = self.sections()
        at = sections.digests_at
        for root, paths in sections.files:
            prefix = "" if root == ABSOLUTE else search.roots[root]
            yield at, [prefix + path for path in paths]
            at += SIZE * len(paths)

    def _appeared(
        self, search: HeaderSearch, digests: FileDigests, location: str
    ) -> Iterator[Difference]:
        """Yield absent files that now exist, by the status of their directories if that tells."""
        known = self._directories.get(location)
        if known is None:
            known = self._directories[location] = self._survey(search)
        for directory, watched in known.items():
            try:
                now = stamp_of(os.stat(directory))
            except OSError:
                now = None
            if now == watched.stamp:
                continue
            if watched.names is None:  # another process stored it: check everything once
                self._directories[location] = self._survey(search)
                yield from self._appeared(search, digests, location)
                return
            digests.reads += 1
            read_at = file_clock_ns()
            paths = (os.path.join(directory, name) for name in watched.names)
            there = None
            for there in filter(os.path.exists, paths):
                yield Difference("appeared", there)
            if there is None and now is not None:
                known[directory] = watched_from(directory, watched.names, now, read_at)

    def _survey(self, search: HeaderSearch) -> dict[str, Watched]:
        """Group the absent files by the deepest directory that exists, stamps unknown."""
        found: dict[str, Watched] = {}
        deepest: dict[str, str] = {}
        for root, paths in self.sections().absent:
            if root >= len(search.roots):
                continue
            for path in sorted(search.path(RootedPath(root, path)) for path in paths):
                folder = os.path.dirname(path)
                existing = deepest.get(folder)
                if existing is None:
                    existing = folder
                    while existing not in ("", "/") and not os.path.isdir(existing):
                        existing = os.path.dirname(existing)
                    deepest[folder] = existing
                names = found.setdefault(existing, Watched(NO_STAMP, [])).names
                assert names is not None
                names.append(path[len(existing) :].lstrip("/"))
        return found

    # -- stamps ----------------------------------------------------------------------------------

    def remember(self, search: HeaderSearch, digests: FileDigests, location: str) -> bool:
        """Take over the present stamps, for storing; tell whether they differ from those stored."""
        paths = [path for _, group in self._files(search) for path in group]
        files = [digests.known(path) or NO_STAMP for path in paths]
        known = self._directories.get(location)
        # Nobody has looked here yet: these are all directories, but their state is unknown.
        if known is None:
            known = self._survey(search)
        stamps = [*zip(paths, files, strict=True), *((p, w.stamp) for p, w in known.items())]
        read_only = ReadOnly()
        lasting = [NO_STAMP if read_only.hides(*each) else each[1] for each in stamps]
        raw = b"".join(
            (
                *(_STAMP.pack(*stamp) for stamp in lasting[: len(files)]),
                struct.pack("<I", len(known)),
                *(_STAMP.pack(*stamp) for stamp in lasting[len(files) :]),
                "\0".join(known).encode("utf-8", "surrogateescape"),
            )
        )
        if self.stamps.get(location) == raw:
            return False
        # A new mapping, not a changed one: another thread may be storing the old one.
        others = [(each, old) for each, old in self.stamps.items() if each != location]
        self.stamps = dict([*others, (location, raw)][-MAX_LOCATIONS:])
        return True

    def _stored(self, location: str) -> Iterable[Stamp]:
        """Return the stamps of the files that another process stored, at the first call.

        They are a shortcut: without them, or if they make no sense, everything is checked.
        """
        raw = self.stamps.get(location)
        if raw is None or location in self._directories:
            return itertools.repeat(NO_STAMP)
        end = _STAMP.size * sum(len(paths) for _, paths in self.sections().files)
        try:
            stamps = list(_STAMP.iter_unpack(raw[:end]))
            self._directories[location] = self._stored_directories(raw[end:])
        except (struct.error, ValueError):
            return itertools.repeat(NO_STAMP)
        return itertools.chain(stamps, itertools.repeat(NO_STAMP))

    def _stored_directories(self, raw: bytes) -> dict[str, Watched]:
        """Return the directories at the end of stored stamps: u32 count, stamps, paths.

        Raises:
            struct.error, ValueError: there are none, and files are absent.
        """
        (count,) = struct.unpack_from("<I", raw)
        end = 4 + count * _STAMP.size
        if not count and not self.sections().absent:
            return {}
        paths = raw[end:].decode("utf-8", "surrogateescape").split("\0")
        stamps = _STAMP.iter_unpack(raw[4:end])
        return {path: Watched(s, None) for path, s in zip(paths, stamps, strict=True)}


class Manifest:
    """The header sets of one request, most recently stored first."""

    __slots__ = ("checked", "header_sets")

    def __init__(self, header_sets: list[StoredHeaderSet]) -> None:
        self.header_sets = header_sets
        #: (location, source's name) -> the `Holding` of the last check there, for `Finder`.
        self.checked: dict[tuple[str, str], Any] = {}

    def matching(
        self, search: HeaderSearch, digests: FileDigests, location: str
    ) -> StoredHeaderSet | None:
        """Return the header set that holds now, or None."""
        for header_set in self.header_sets:
            with suppress(CorruptEntryError):  # intact, but not a header set
                if header_set.good_at(location) and header_set.holds(search, digests, location):
                    return header_set
        return None

    def provable(
        self, search: HeaderSearch, digests: FileDigests, location: str
    ) -> StoredHeaderSet | None:
        """Return a set that holds, was made in another location, and may be good for all.

        Return None if a set that holds was found to depend on its location.
        """
        found = None
        for header_set in self.header_sets:
            with suppress(CorruptEntryError):
                judged = header_set.may_be_good_elsewhere or header_set.is_refuted
                if judged and header_set.holds(search, digests, location, proven=True):
                    if header_set.is_refuted:
                        return None
                    found = found or header_set
        return found

    def judge(self, header_set: StoredHeaderSet, *, good: bool) -> StoredHeaderSet:
        """Note the verdict of a proof; return the set as it is now.

        A set that is good everywhere comes first, and replaces all sets with the same answers that
        may be good everywhere. No set is good everywhere if another with the same answers is not.
        """
        sets, answers = self.header_sets, header_set.unbound().raw
        # If a header set with the same answers depends on the location, so does this one, whatever
        # this proof shows.
        good = good and not any(old.is_refuted and old.unbound().raw == answers for old in sets)
        judged = header_set.judged(good=good)
        if not good:
            others = [old for old in sets if old.raw != judged.raw]
            self.header_sets = [judged if old.raw == header_set.raw else old for old in others]
            return judged
        kept = [
            old
            for old in sets
            if old.raw != judged.raw
            and not (old.may_be_good_elsewhere and old.unbound().raw == answers)
        ]
        self.header_sets = [judged, *kept][:MAX_SETS]
        return judged

    def add(self, header_set: StoredHeaderSet) -> None:
        """Put a header set first; it replaces an equal one, and takes over its stamps."""
        for old in self.header_sets:
            if old.raw == header_set.raw:
                header_set.stamps = {**old.stamps, **header_set.stamps}
        kept = [old for old in self.header_sets if old.raw != header_set.raw]
        self.header_sets = [header_set, *kept][:MAX_SETS]

    def to_entry(self) -> Entry:
        """Return the entry that holds this manifest."""
        payload: dict[str, bytes] = {}
        for number, header_set in enumerate(self.header_sets):
            payload[f"set{number}"] = header_set.raw
            for location, raw in header_set.stamps.items():
                payload[f"stamps{number}.{location}"] = raw
        return Entry(payload, {"kind": "manifest"})

    @classmethod
    def from_entry(cls, entry: Entry) -> Manifest:
        """Return the manifest in an entry.

        Raises:
            CorruptEntryError: the entry holds none.
        """
        header_sets: list[StoredHeaderSet] = []
        payload = entry.payload
        for number in range(MAX_SETS):
            raw = payload.get(f"set{number}")
            if raw is None:
                break
            header_sets.append(StoredHeaderSet(raw))
        for name, raw in payload.items():
            which, dot, location = name.removeprefix("stamps").partition(".")
            if dot and which.isdecimal() and int(which) < len(header_sets):
                header_sets[int(which)].stamps[location] = raw
        return cls(header_sets)
