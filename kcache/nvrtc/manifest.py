"""Manifest: the dependency sets that one request has had so far, and how to check them.

Stored as an entry under the request's key. Sections: `set0`, `set1`, ... the dependency sets, most
recent first; `stamps0.LOCATION` what `FileDigests` remembered of set 0's files where the include
directories lie as LOCATION says.

A set is a u32 length, a text of that length, and 16 bytes of digest per file that was read. The
text is groups separated by two NULs; a group is a KIND and a root's number, then fields separated
by NULs. Kinds whose fields are paths below the root: ``f`` files that were read, ``a`` absent,
``p`` present and not opened, ``d`` directories, ``n`` names of in-memory texts. Others: ``i`` a
number and one path: paths with equal numbers are one file, others are not; ``e`` an error's number
and a path; ``v`` (root 0) a variable,
``NAME=VALUE`` or ``NAME`` for one that is not set. Two groups come last: ``c`` (root 0) has the
conditions for the use of the result elsewhere, see `places`; ``x`` (root 0) has the location of the
compile. The key of a kernel is made of everything else in the set.

Stamps are five signed 64-bit integers (`Stamp`), zeros for what is not trusted: first one per
file; then a u32 count of directories, their stamps, and their absolute paths separated by NULs.
Everything is little-endian.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import NamedTuple

from kcache.entry import Entry
from kcache.errors import CorruptEntryError
from kcache.nvrtc import places
from kcache.nvrtc.files import (
    NO_STAMP,
    FileDigests,
    Stamp,
    Watched,
    error_now,
    lasting,
    lasting_once,
    stamp_of,
    watched_from,
)
from kcache.nvrtc.headers import (
    Sections,
    confused_names,
    decode,
    each_path,
    is_header,
    same_identities,
)
from kcache.nvrtc.request import Request, digest_fields
from kcache.nvrtc.search import HeaderSearch, RootedPath

#: How many dependency sets a request keeps. If there are more, the least recently stored one is
#: forgotten.
MAX_SETS = 16
#: For how many places a set keeps stamps: checkouts and containers that share a cache.
MAX_LOCATIONS = 4

_STAMP = struct.Struct("<5q")


class Difference(NamedTuple):
    """One difference between a dependency set and the present state.

    Attributes:
        kind: `changed` or `gone`, of a header that was read; `appeared`, of something that was not
            there; `vanished`, of something that was; `identity`, of files that became one, or two;
            `root`, of a set that is for another include path; `variable`, of an environment
            variable; `answer`, of a path that could not be read, or now can't be so for another
            reason; `place`, of a directory that the result depends on.
        path: absolute path of the file, or name of the variable or the source; empty where no
            single one is meant.
    """

    kind: str
    path: str


class _Seen:
    """What is known of a dependency set's files in one location.

    Attributes:
        paths: absolute paths of the headers, in the set's order.
        dependencies: the same, sorted.
        stamps: under which each had its digest; `NO_STAMP` for what must be read again.
        directories: what the last check for absent files found; None before the first.
        misplaced: why the result is not used here, as far as names decide; None before the first
            look.
        readings: see `places`.
    """

    __slots__ = ("dependencies", "directories", "misplaced", "paths", "readings", "stamps")

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self.dependencies = tuple(sorted(paths))
        self.stamps = [NO_STAMP] * len(paths)
        self.directories: dict[str, Watched] | None = None
        self.misplaced: tuple[Difference, ...] | None = None
        self.readings: list[Request] = []

    def pack(self) -> bytes:
        """Return what another process may trust, as the module describes it."""
        known = self.directories or {}
        watched = (each.stamp for each in known.values())
        stamps = lasting((*self.paths, *known), (*self.stamps, *watched))
        packed = [_STAMP.pack(*stamp) for stamp in stamps]
        packed.insert(len(self.paths), struct.pack("<I", len(known)))
        return b"".join((*packed, "\0".join(known).encode("utf-8", "surrogateescape")))

    def unpack(self, raw: bytes, *, absent: bool) -> None:
        """Take over what another process has verified. Without it, everything is checked.

        `absent` tells whether files were absent, so that there are directories.
        """
        end = _STAMP.size * len(self.paths)
        with suppress(struct.error, ValueError):
            (count,) = struct.unpack_from("<I", raw, end)
            stamps = list(_STAMP.iter_unpack(raw[:end]))
            middle = end + 4 + count * _STAMP.size
            paths = raw[middle:].decode("utf-8", "surrogateescape").split("\0") if count else []
            watched = list(_STAMP.iter_unpack(raw[end + 4 : middle]))
            if len(watched) == len(paths) and (count or not absent):
                trusted = lasting_once((*self.paths, *paths), (*stamps, *watched))
                self.stamps = list(trusted[: len(stamps)])
                self.directories = {
                    p: Watched(s, None) for p, s in zip(paths, trusted[len(stamps) :], strict=True)
                }


class DependencySet:
    """One dependency set of a request, with the stamps under which its files had their digests.

    It is made from the set's canonical encoding, which is decoded when it is first needed. Threads:
    safe to share; stamps are replaced, not changed.

    Args:
        raw: the encoding.
        stamps: location -> encoded stamps.

    Attributes:
        raw, stamps: as given; `remember` adds stamps.
    """

    __slots__ = ("_identity", "_result", "_sections", "_seen", "raw", "stamps")

    def __init__(self, raw: bytes, stamps: Mapping[str, bytes] = MappingProxyType({})) -> None:
        self.raw = raw
        self.stamps = dict(stamps)
        self._sections: Sections | None = None
        self._identity = ""
        #: The last key of a request, and that of its outcome.
        self._result = "", ""
        self._seen: dict[str, _Seen] = {}

    def sections(self) -> Sections:
        """Return the set by kind.

        Raises:
            CorruptEntryError: the encoding is none.
        """
        if self._sections is None:
            self._sections = decode(self.raw)
        return self._sections

    def dependencies(self, request: Request) -> tuple[str, ...]:
        """Return the absolute paths of the headers, sorted; one tuple per location."""
        return self._at(request).dependencies

    @property
    def conditions(self) -> list[str]:
        """What must hold where the result was not compiled; see `places`."""
        return self.sections().conditions

    def result_key(self, request_key: str) -> str:
        """Return the key of the outcome: the request, and the answers that the compiler got."""
        known, key = self._result
        if known != request_key:
            fields = [("request", request_key.encode()), ("headers", self.identity.encode())]
            key = digest_fields("kcache-result/5", fields)
            self._result = request_key, key
        return key

    @property
    def identity(self) -> str:
        """The digest of the answers and the conditions, wherever the result was compiled."""
        if not self._identity:
            text, digests = self.raw, b""
            with suppress(CorruptEntryError):  # intact, but not a dependency set
                at = self.sections().digests_at
                text, digests = self.raw[4:at].rpartition(b"\0\0")[0], self.raw[at:]  # no home
            self._identity = digest_fields("kcache-set/2", [("set", text), ("digests", digests)])
        return self._identity

    # -- whether it holds ------------------------------------------------------------------------

    def holds(self, request: Request, digests: FileDigests) -> bool:
        """Return whether every file is now as the set says, and keep what was verified."""
        verified: list[Stamp] = []
        if next(self.differences(request, digests, verified), None) is not None:
            return False
        self._at(request).stamps = verified
        return True

    def differences(
        self,
        request: Request,
        digests: FileDigests,
        verified: list[Stamp],
        *,
        reading: bool = False,
    ) -> Iterator[Difference]:
        """Yield the differences from the set, those first that are cheapest to find.

        Args:
            request: the request.
            digests: the contents of files.
            verified: gets the stamps of the files that have none.
            reading: whether the request is another reading of one that was checked; see `places`.
        """
        sections, search = self.sections(), request.search
        if sections.roots > len(search.roots):
            yield Difference("root", "")
            return
        seen = self._at(request)
        if not (reading or sections.home == request.location):
            if seen.misplaced is None:
                seen.misplaced = tuple(self._misplaced(request, seen.readings))
            yield from seen.misplaced
            for each in seen.readings:
                yield from self.differences(each, digests, [], reading=True)
        at = sections.digests_at
        for path in digests.differing(seen.paths, self.raw, at, seen.stamps, verified):
            yield Difference("changed" if is_header(path) else "gone", path)
        yield from self._appeared(search, digests, seen)
        if sections.same and not same_identities(sections.same, search):
            yield Difference("identity", "")
        for path in map(search.path, sections.present):
            if not is_header(path):
                yield Difference("vanished", path)
        for path in map(search.path, sections.folders):
            if not os.path.isdir(path):
                yield Difference("vanished", path)
        names = map(search.path, sections.names)
        for path in confused_names(names, search.in_memory()[0], seen.paths):
            yield Difference("identity", path)
        yield from self._other_answers(sections, search)

    def _misplaced(self, request: Request, readings: list[Request]) -> Iterator[Difference]:
        """Yield what keeps the result from being used where it was not compiled.

        `readings` gets the other readings of the request for which the answers must hold, too.
        """
        sections, search = self.sections(), request.search
        for condition in sections.conditions:
            try:
                readings += places.readings(condition, request)
            except ValueError:
                yield Difference("place", places.text_of(condition))
        # A question for one of the compiler's own texts would be answered from memory.
        source, *headers = map(os.path.normpath, search.in_memory())
        own = {source, *headers}
        if source in headers:
            yield Difference("identity", source)
        if any(os.fsencode(os.path.basename(path)) in self.raw for path in own):
            asked = map(os.path.normpath, map(search.path, _asked(sections)))
            yield from (Difference("identity", path) for path in own.intersection(asked))

    @staticmethod
    def _other_answers(sections: Sections, search: HeaderSearch) -> Iterator[Difference]:
        for error, rooted in sections.denied:
            if error_now(search.path(rooted)) != error:
                yield Difference("answer", search.path(rooted))
        for name, value in sections.variables:
            if search.variable(name) != value:
                yield Difference("variable", name)

    def _at(self, request: Request) -> _Seen:
        """Return what is known in a location; at first, that is what another process stored."""
        location = request.location
        seen = self._seen.get(location)
        if seen is None:
            sections = self.sections()
            seen = _Seen([request.search.path(rooted) for rooted in each_path(sections.files)])
            if location in self.stamps:
                seen.unpack(self.stamps[location], absent=bool(sections.absent))
            self._seen[location] = seen
        return seen

    def _appeared(
        self, search: HeaderSearch, digests: FileDigests, seen: _Seen
    ) -> Iterator[Difference]:
        """Yield absent files that now exist, by the status of their directories if that tells."""
        known = seen.directories
        if known is None:
            known = seen.directories = self._survey(search)
        for directory, watched in known.items():
            try:
                now = stamp_of(os.stat(directory))
            except OSError:
                now = None
            if now == watched.stamp:
                continue
            if watched.names is None:  # another process stored it: check everything once
                seen.directories = None
                yield from self._appeared(search, digests, seen)
                return
            digests.reads += 1
            read_at = digests.clock()
            paths = (os.path.join(directory, name) for name in watched.names)
            there = None
            for there in filter(os.path.exists, paths):
                yield Difference("appeared", there)
            if there is None and now is not None:
                known[directory] = watched_from(directory, watched.names, now, read_at)

    def _survey(self, search: HeaderSearch) -> dict[str, Watched]:
        """Group the absent files by the deepest directory that exists, stamps unknown."""
        found: dict[str, list[str]] = {}
        deepest: dict[str, str] = {}
        for path in sorted(map(search.path, each_path(self.sections().absent))):
            folder = os.path.dirname(path)
            existing = deepest.get(folder)
            if existing is None:
                existing = folder
                while existing not in ("", "/") and not os.path.isdir(existing):
                    existing = os.path.dirname(existing)
                deepest[folder] = existing
            found.setdefault(existing, []).append(path[len(existing) :].lstrip("/"))
        return {directory: Watched(NO_STAMP, names) for directory, names in found.items()}

    # -- what was verified -----------------------------------------------------------------------

    def remember(self, request: Request) -> bool:
        """Take over what was verified, for storing; tell whether it differs from what is stored."""
        location, raw = request.location, self._at(request).pack()
        if self.stamps.get(location) == raw:
            return False
        # A new mapping, not a changed one: another thread may be storing the old one.
        others = [(each, old) for each, old in self.stamps.items() if each != location]
        self.stamps = dict([*others, (location, raw)][-MAX_LOCATIONS:])
        return True


def _asked(sections: Sections) -> Iterator[RootedPath]:
    """Yield every path that the compiler asked for, but the names of its own texts."""
    yield from each_path((*sections.files, *sections.absent))
    yield from (*sections.present, *sections.folders)
    yield from (rooted for _, rooted in sections.denied)


class Manifest:
    """The dependency sets of one request, most recently stored first."""

    __slots__ = ("checked", "dependency_sets")

    def __init__(self, dependency_sets: list[DependencySet]) -> None:
        self.dependency_sets = dependency_sets
        #: location -> the set that held at the last check there.
        self.checked: dict[str, DependencySet] = {}

    def was_checked_at(self, location: str) -> bool:
        """Return whether a dependency set has held where a request comes from."""
        return any(location in each.stamps for each in self.dependency_sets)

    def matching(self, request: Request, digests: FileDigests) -> DependencySet | None:
        """Return the dependency set that holds now, or None."""
        for dependency_set in self.dependency_sets:
            with suppress(CorruptEntryError):  # intact, but not a dependency set
                if dependency_set.holds(request, digests):
                    return dependency_set
        return None

    def add(self, dependency_set: DependencySet) -> None:
        """Put a dependency set first; it replaces an equal one, and takes over its stamps."""
        kept: list[DependencySet] = []
        for old in self.dependency_sets:
            if old.identity == dependency_set.identity:
                dependency_set.stamps = {**old.stamps, **dependency_set.stamps}
            else:
                kept.append(old)
        self.dependency_sets = [dependency_set, *kept][:MAX_SETS]

    def to_entry(self) -> Entry:
        """Return the entry that holds this manifest."""
        payload: dict[str, bytes] = {}
        for number, dependency_set in enumerate(self.dependency_sets):
            payload[f"set{number}"] = dependency_set.raw
            for location, raw in dependency_set.stamps.items():
                payload[f"stamps{number}.{location}"] = raw
        return Entry(payload, {"kind": "manifest"})

    @classmethod
    def from_entry(cls, entry: Entry) -> Manifest:
        """Return the manifest in an entry.

        Raises:
            CorruptEntryError: the entry holds none.
        """
        dependency_sets: list[DependencySet] = []
        payload = entry.payload
        for number in range(MAX_SETS):
            raw = payload.get(f"set{number}")
            if raw is None:
                break
            dependency_sets.append(DependencySet(raw))
        for name, raw in payload.items():
            which, dot, location = name.removeprefix("stamps").partition(".")
            if dot and which.isdecimal() and int(which) < len(dependency_sets):
                dependency_sets[int(which)].stamps[location] = raw
        return cls(dependency_sets)
