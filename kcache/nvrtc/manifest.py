"""Manifest: the header sets that one request has had so far, and how to check them.

Stored as an entry under the request's key. Sections: `set0`, `set1`, ... the header sets, most
recent first; `stamps0.LOCATION` what `FileDigests` remembered of set 0's files where the include
directories lie as LOCATION says. A set is text and digests: NUL-separated fields
`KIND ROOT PATH` with KIND one of ``f`` (file), ``a`` (absent), ``p`` (present), ``t`` (a tree, all
of whose files are listed), then a line feed, then 16 bytes per file. Stamps are, per file and then
per directory, five signed 64-bit little-endian integers (`Stamp`); a file that is not trusted has
zeros; the directories' paths follow, NUL-separated.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

from kcache.entry import Entry
from kcache.errors import CorruptEntryError
from kcache.key import digest_fields
from kcache.nvrtc.files import FRESH_NS, FileDigests, Stamp, file_clock_ns, stamp_of
from kcache.nvrtc.headers import HeaderSet, is_header, tree_files
from kcache.nvrtc.search import HeaderSearch, Place

__all__ = ["MAX_LOCATIONS", "MAX_SETS", "Manifest", "Variant"]

#: Header sets kept per request; with more, the least recently stored is forgotten.
MAX_SETS = 16
#: Places whose stamps are kept per set: checkouts and containers that share a cache.
MAX_LOCATIONS = 4

_STAMP = struct.Struct("<5q")
_NO_STAMP: Stamp = (0, 0, 0, 0, 0)


class Variant:
    """One header set of a request, with what is remembered of its files.

    Attributes:
        headers: the set.
        raw: its canonical encoding, which the result's key is made of.
        stamps: location -> encoded stamps.
        paths: location -> absolute paths of the headers.
        directories: location -> directory -> (stamp, names that are absent below it): what the
            check found last time in this process.
    """

    __slots__ = ("directories", "headers", "paths", "raw", "stamps")

    def __init__(self, headers: HeaderSet, raw: bytes) -> None:
        self.headers = headers
        self.raw = raw
        self.stamps: dict[str, bytes] = {}
        self.paths: dict[str, tuple[str, ...]] = {}
        self.directories: dict[str, dict[str, tuple[Stamp, list[str]]]] = {}

    @classmethod
    def of(cls, headers: HeaderSet) -> Variant:
        """Return a variant of a new header set."""
        return cls(headers, _encode(headers))

    def dependencies(self, search: HeaderSearch, location: str) -> tuple[str, ...]:
        """Return the absolute paths of the headers, sorted; one tuple per location."""
        found = self.paths.get(location)
        if found is None:
            found = self.paths[location] = tuple(sorted(map(search.path, self.headers.files)))
        return found

    def result_key(self, request_key: str, search: HeaderSearch) -> str:
        """Return the key of the outcome: the request, the headers, and paths where it has any."""
        fields = [("request", request_key.encode()), ("headers", self.raw)]
        if self.headers.paths:
            fields += (("path", prefix.encode()) for prefix in search.prefixes)
        return digest_fields("kcache-result/1", fields)

    def holds(self, search: HeaderSearch, digests: FileDigests, location: str) -> bool:
        """Tell whether every file is now as the set says."""
        headers = self.headers
        raw = self.stamps.get(location)
        if raw is not None and location not in self.directories:
            self._seed(raw, search, digests, location)
        roots = len(search.prefixes)
        matches = digests.matches
        base = search.directory + "/"
        prefixes = [p if p.startswith("/") else base + p for p in search.prefixes]
        prefixes.append("")  # root -1, ABSOLUTE
        for (root, path), digest in headers.files.items():
            if root >= roots or not matches(prefixes[root] + path, digest):
                return False
        if not all(is_header(search.path(place)) for place in headers.present):
            return False
        if not self._all_absent(search, digests, location):
            return False
        return all(self._tree_is(root, search) for root in headers.trees)

    def _tree_is(self, root: int, search: HeaderSearch) -> bool:
        """Tell whether a root holds no file but those of the set."""
        listed = {path for r, path in self.headers.files if r == root}
        found = tree_files(os.path.join(search.directory, search.prefixes[root]), len(listed))
        return found is not None and listed.issuperset(found)

    def _all_absent(self, search: HeaderSearch, digests: FileDigests, location: str) -> bool:
        """Check the absent files, by the status of their directories where that is enough."""
        known = self.directories.get(location)
        if known is None:
            known = self.directories[location] = _by_directory(self.headers.absent, search)
        for directory, (stamp, names) in known.items():
            try:
                now = stamp_of(os.stat(directory))
            except OSError:
                if _any_header(directory, names):
                    return False
                continue
            if now == stamp:
                continue
            digests.reads += 1
            read_at = file_clock_ns()
            if _any_header(directory, names):
                return False
            # A link may change what is below it without a trace in this directory.
            fresh = max(now[1], now[2]) >= read_at - FRESH_NS
            linked = any(os.path.islink(os.path.join(directory, name)) for name in names)
            known[directory] = (_NO_STAMP if fresh or linked else now, names)
        return True

    # -- stamps ----------------------------------------------------------------------------------

    def remember(self, search: HeaderSearch, digests: FileDigests, location: str) -> bool:
        """Take up the present stamps, for storing; tell whether they differ from those stored."""
        files = [digests.known(search.path(place)) or _NO_STAMP for place in self.headers.files]
        known = self.directories.get(location, {})
        stamps = files + [stamp for stamp, _ in known.values()]
        raw = b"".join(_STAMP.pack(*stamp) for stamp in stamps) + "\0".join(known).encode(
            "utf-8", "surrogateescape"
        )
        if self.stamps.get(location) == raw:
            return False
        # A new mapping, not a changed one: another thread may be storing the old one.
        others = [(place, old) for place, old in self.stamps.items() if place != location]
        self.stamps = dict([*others, (location, raw)][-MAX_LOCATIONS:])
        return True

    def _seed(self, raw: bytes, search: HeaderSearch, digests: FileDigests, location: str) -> None:
        """Take over the stamps that another process stored."""
        known = _by_directory(self.headers.absent, search)
        self.directories[location] = known
        count = len(self.headers.files)
        try:
            stamps = list(_STAMP.iter_unpack(raw[: count * _STAMP.size]))
            rest = raw[count * _STAMP.size :]
            base = search.directory + "/"
            prefixes = [p if p.startswith("/") else base + p for p in search.prefixes]
            prefixes.append("")
            for ((root, path), digest), stamp in zip(
                self.headers.files.items(), stamps, strict=True
            ):
                if stamp != _NO_STAMP and root < len(search.prefixes):
                    digests.seed(prefixes[root] + path, stamp, digest)
            names = rest[len(known) * _STAMP.size :].decode("utf-8", "surrogateescape").split("\0")
            if names == list(known):
                for directory, stamp in zip(
                    names, _STAMP.iter_unpack(rest[: len(known) * _STAMP.size]), strict=True
                ):
                    known[directory] = (stamp, known[directory][1])
        except (struct.error, ValueError):
            return  # stamps are a shortcut: without them everything is looked at


class Manifest:
    """The variants of one request, most recently stored first."""

    __slots__ = ("variants",)

    def __init__(self, variants: list[Variant]) -> None:
        self.variants = variants

    def matching(self, search: HeaderSearch, digests: FileDigests, location: str) -> Variant | None:
        """Return the variant whose files are all as it says, or None."""
        for variant in self.variants:
            if variant.holds(search, digests, location):
                return variant
        return None

    def add(self, variant: Variant) -> None:
        """Put a variant first; an equal one gives it its stamps and goes."""
        for old in self.variants:
            if old.raw == variant.raw:
                variant.stamps = {**old.stamps, **variant.stamps}
        kept = [old for old in self.variants if old.raw != variant.raw]
        self.variants = [variant, *kept][:MAX_SETS]

    def to_entry(self) -> Entry:
        """Return the entry that holds this manifest."""
        payload: dict[str, bytes] = {}
        for number, variant in enumerate(self.variants):
            payload[f"set{number}"] = variant.raw
            for location, raw in variant.stamps.items():
                payload[f"stamps{number}.{location}"] = raw
        return Entry(payload, {"kind": "manifest"})

    @classmethod
    def from_entry(cls, entry: Entry) -> Manifest:
        """Return the manifest in an entry.

        Raises:
            CorruptEntryError: the entry holds none.
        """
        variants: list[Variant] = []
        payload = entry.payload
        for number in range(MAX_SETS):
            raw = payload.get(f"set{number}")
            if raw is None:
                break
            variants.append(Variant(_decode(raw), raw))
        for name, raw in payload.items():
            which, dot, location = name.removeprefix("stamps").partition(".")
            if dot and which.isdecimal() and int(which) < len(variants):
                variants[int(which)].stamps[location] = raw
        return cls(variants)


def _by_directory(
    absent: Iterable[Place], search: HeaderSearch
) -> dict[str, tuple[Stamp, list[str]]]:
    """Group absent files by the deepest directory above them that exists, stamps unknown."""
    found: dict[str, tuple[Stamp, list[str]]] = {}
    deepest: dict[str, str] = {}
    for place in sorted(absent):
        if not search.has(place):
            continue
        path = search.path(place)
        folder = os.path.dirname(path)
        existing = deepest.get(folder)
        if existing is None:
            existing = folder
            while existing not in ("", "/") and not os.path.isdir(existing):
                existing = os.path.dirname(existing)
            deepest[folder] = existing
        found.setdefault(existing, (_NO_STAMP, []))[1].append(path[len(existing) :].lstrip("/"))
    return found


def _any_header(directory: str, names: Iterable[str]) -> bool:
    return any(is_header(os.path.join(directory, name)) for name in names)


def _encode(headers: HeaderSet) -> bytes:
    files = sorted(headers.files.items())
    fields = [f"f {place.root} {place.path}" for place, _ in files]
    fields += (f"a {place.root} {place.path}" for place in sorted(headers.absent))
    fields += (f"p {place.root} {place.path}" for place in sorted(headers.present))
    fields += (f"t {root} " for root in sorted(headers.trees))
    fields += ("x 0 ",) if headers.paths else ()
    text = "\0".join(fields).encode("utf-8", "surrogateescape")
    return struct.pack("<I", len(text)) + text + b"".join(digest for _, digest in files)


def _decode(raw: bytes) -> HeaderSet:
    try:
        (length,) = struct.unpack_from("<I", raw)
        fields = raw[4 : 4 + length].decode("utf-8", "surrogateescape").split("\0")
        places: dict[str, list[Place]] = {"f": [], "a": [], "p": [], "t": [], "x": []}
        for line in filter(None, fields):
            kind, root, path = line.split(" ", 2)
            places[kind].append(Place(int(root), path))
        digests = [raw[at : at + 16] for at in range(4 + length, len(raw), 16)]
        return HeaderSet(
            dict(zip(places["f"], digests, strict=True)),
            frozenset(places["a"]),
            frozenset(places["p"]),
            frozenset(place.root for place in places["t"]),
            paths=bool(places["x"]),
        )
    except (struct.error, ValueError, KeyError) as error:
        raise CorruptEntryError(f"malformed header set: {error}") from error
