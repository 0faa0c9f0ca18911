"""Entry, and the envelope: the bytes that a backend stores for an entry.

The envelope has these fields; all integers are little-endian:

====================  =========  ==========================================================
field                 bytes      meaning
====================  =========  ==========================================================
magic                 6          ``KCACHE``
format version        2          `FORMAT_VERSION`
total length          8          of the whole envelope, checksum included
cost                  8          IEEE double: how many seconds it took to make the payload
key                   32         the key that the entry was stored under
section count         2          number of payload sections
producer length       2          of the producer string
metadata length       4          of the JSON metadata
producer              variable   UTF-8: the frontend that made the payload, and its layout
section table         variable   for each section: u8 name length, UTF-8 name, u64 size
metadata              variable   UTF-8 JSON object
sections              variable   the payload, in the order of the table, without gaps
checksum              16         XXH3-128 (big-endian canonical form) of all bytes before it
====================  =========  ==========================================================

Envelopes of every format version end in the same kind of checksum. So a reader can distinguish a
damaged envelope from one of another version, even if it does not support the other version's
layout. XXH3 is specified at
https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md; it detects damage, not forgery.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeAlias, cast

import xxhash

from kcache.errors import ArgumentTypeError, CorruptEntryError, IncompatibleEntryError

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

FORMAT_VERSION = 1
MAX_SECTIONS = 256
#: The largest size of an entry's metadata in bytes. Its largest part is the compiler's log.
MAX_METADATA = 16 << 20
MAX_PRODUCER = 256
#: The most levels to which an entry's metadata may be nested.
_MANY_LEVELS = 64

_MAGIC = b"KCACHE"
_HEADER = struct.Struct("<6sHQd32sHHI")
_SIZE = struct.Struct("<Q")
_CHECKSUM = 16
_SMALLEST = _HEADER.size + _CHECKSUM

_INFINITY = float("inf")

_checksum = xxhash.xxh3_128_digest
_set = object.__setattr__


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number in JSON")


_decode_json = json.JSONDecoder(parse_constant=_no_number).decode
_compact = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode


def _require_shallow(value: object) -> None:
    """Raise an error if metadata is nested so deeply that recursive code could overflow the stack.

    Raises:
        ValueError: the metadata has more than `_MANY_LEVELS` levels.
    """
    level = [value]
    for _ in range(_MANY_LEVELS):
        inside: list[object] = []
        for each in level:
            if isinstance(each, dict):
                inside += cast("dict[str, object]", each).values()
            elif isinstance(each, list):
                inside += cast("list[object]", each)
        if not inside:
            return
        level = inside
    raise ValueError(f"metadata: expected at most {_MANY_LEVELS} levels, got more")


class Entry:
    """What is stored under one key: named byte strings, and JSON metadata about them.

    An entry is immutable, so threads may share it. Two entries are equal if their payloads and
    their metadata are equal.

    Args:
        payload: maps the name of each section to its bytes. There are at most `MAX_SECTIONS`
            sections, with names of 1 to 255 bytes in UTF-8.
        metadata: maps text to JSON values; at most `MAX_METADATA` bytes when encoded. The number
            under `compile_seconds`, if there is one, is the time that a hit saves.

    Raises:
        ArgumentTypeError: `payload` does not map text to bytes, or `metadata` is not a mapping.
    """

    __slots__ = ("cost", "metadata", "payload")

    #: Maps the name of each section to its bytes.
    payload: Mapping[str, bytes]
    #: Maps text to JSON values that describe the payload.
    metadata: Mapping[str, JSON]
    #: How many seconds it took to make the payload; 0.0 if unknown.
    cost: float

    def __init__(
        self, payload: Mapping[str, bytes], metadata: Mapping[str, JSON] | None = None
    ) -> None:
        checked = _mapping("payload", payload)
        for name, value in checked.items():
            if not isinstance(name, str):
                raise ArgumentTypeError(f"payload names: expected str, got {type(name).__name__}")
            if not isinstance(value, bytes):
                raise ArgumentTypeError(
                    f"payload[{name!r}]: expected bytes, got {type(value).__name__}"
                )
        about = _mapping("metadata", metadata or {})
        _fill(self, checked, about, _cost(about.get("compile_seconds")))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Raise an AttributeError, because an entry is immutable."""
        raise AttributeError(f"an Entry is immutable: {name} can't be set")

    @property
    def size(self) -> int:
        """The size of the payload in bytes, without names and metadata."""
        return sum(map(len, self.payload.values()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Entry):
            return NotImplemented
        return dict(self.payload) == dict(other.payload) and dict(self.metadata) == dict(
            other.metadata
        )

    def __hash__(self) -> int:
        return hash(tuple((name, len(value)) for name, value in self.payload.items()))

    def __repr__(self) -> str:
        sections = ", ".join(f"{name}: {len(value)} B" for name, value in self.payload.items())
        return f"Entry({{{sections}}}, {dict(self.metadata)!r})"


def _fill(entry: Entry, payload: dict[str, bytes], metadata: dict[str, JSON], cost: float) -> None:
    _set(entry, "payload", MappingProxyType(payload))
    _set(entry, "metadata", MappingProxyType(metadata))
    _set(entry, "cost", cost)


def _mapping(what: str, value: object) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise ArgumentTypeError(f"{what}: expected a mapping, got {type(value).__name__}")
    return dict(cast("Mapping[Any, Any]", value))  # type: ignore[redundant-cast]


def _cost(seconds: object) -> float:
    """Return `seconds` as a float if it is a finite number from 0, otherwise 0.0."""
    try:
        cost = float(seconds) if isinstance(seconds, (int, float)) else 0.0
    except OverflowError:
        return 0.0
    return cost if 0.0 <= cost < _INFINITY else 0.0


def encode(key: str, entry: Entry, *, producer: bytes = b"") -> bytes:
    """Return the envelope for storing `entry` under `key` (64 hexadecimal digits).

    Raises:
        ArgumentTypeError: `entry` is not an Entry, its metadata has a value that JSON can't
            represent, or one of its parts is larger than the format allows.
    """
    try:
        metadata = _compact(dict(entry.metadata)).encode()
        if metadata.count(b"[") + metadata.count(b"{") > _MANY_LEVELS:
            _require_shallow(json.loads(metadata))
        names = [name.encode() for name in entry.payload]
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        if not isinstance(entry, Entry):  # what a caller's `create` returned, for example
            given = type(entry).__name__
            raise ArgumentTypeError(f"entry: expected an Entry, got {given}") from None
        raise ArgumentTypeError(
            "entry: either its metadata can't be encoded as JSON, or the name of a section can't "
            f"be encoded in UTF-8: {error}"
        ) from error
    values = list(entry.payload.values())
    if len(metadata) > MAX_METADATA:
        raise ArgumentTypeError(
            f"metadata: expected at most {MAX_METADATA} bytes, got {len(metadata)}"
        )
    if len(names) > MAX_SECTIONS or any(not 0 < len(name) < 256 for name in names):
        raise ArgumentTypeError(
            f"payload: expected at most {MAX_SECTIONS} sections with names of 1 to 255 bytes"
        )
    if len(producer) > MAX_PRODUCER:
        raise ArgumentTypeError(
            f"producer: expected at most {MAX_PRODUCER} bytes, got {len(producer)}"
        )
    table = b"".join(
        bytes((len(name),)) + name + _SIZE.pack(len(value))
        for name, value in zip(names, values, strict=True)
    )
    total = _SMALLEST + len(producer) + len(table) + len(metadata) + sum(map(len, values))
    header = _HEADER.pack(
        _MAGIC,
        FORMAT_VERSION,
        total,
        entry.cost,
        bytes.fromhex(key),
        len(names),
        len(producer),
        len(metadata),
    )
    body = b"".join((header, producer, table, metadata, *values))
    return body + _checksum(body)


def decode(blob: bytes, key: str, *, producer: bytes = b"") -> Entry:
    """Check every part of the envelope `blob` that was stored under `key`, and return its entry.

    A wrong length field can't make this function allocate more memory than the length of `blob`,
    plus the metadata as Python objects.

    Raises:
        IncompatibleEntryError: the envelope is not damaged, but of another format version, or its
            producer is not `producer`.
        CorruptEntryError: the envelope is in any other way not what `encode` returned for `key`.
    """
    cost, count, position, text_length = _checked_header(blob, key, producer)
    try:
        sizes: list[tuple[str, int]] = []
        for _ in range(count):
            start = position + 1
            position = start + blob[position]
            sizes.append((blob[start:position].decode(), _SIZE.unpack_from(blob, position)[0]))
            position += _SIZE.size
        metadata = _metadata_in(blob[position : position + text_length])
    except (IndexError, struct.error, ValueError, RecursionError) as error:
        raise CorruptEntryError(
            f"either its section table or its metadata is malformed: {error}"
        ) from error
    position += text_length
    if position + sum(size for _, size in sizes) != len(blob) - _CHECKSUM:
        raise CorruptEntryError("its length does not match the sizes of its sections")
    payload: dict[str, bytes] = {}
    for name, size in sizes:
        payload[name] = blob[position : position + size]
        position += size
    if len(payload) != count:
        raise CorruptEntryError("two of its sections have the same name")
    entry = object.__new__(Entry)
    _fill(entry, payload, metadata, cost)
    return entry


def _checked_header(blob: bytes, key: str, producer: bytes) -> tuple[float, int, int, int]:
    """Check the checksum and the header of an envelope; return the fields that `decode` needs.

    These are the cost, the number of sections, the offset of the section table, and the length of
    the metadata.

    Raises:
        IncompatibleEntryError, CorruptEntryError: the same errors as for `decode`.
    """
    end = len(blob) - _CHECKSUM
    if end < _HEADER.size:
        raise CorruptEntryError(
            f"it is too short: expected at least {_SMALLEST} bytes, got {len(blob)}"
        )
    if _checksum(memoryview(blob)[:end]) != blob[end:]:
        raise CorruptEntryError("checksum mismatch")
    magic, version, total, cost, stored_key, count, maker_length, text_length = _HEADER.unpack_from(
        blob
    )
    if magic != _MAGIC:
        raise CorruptEntryError("it is not an entry of kcache")
    if version != FORMAT_VERSION:
        raise IncompatibleEntryError(
            f"it has format version {version}, and this kcache reads version {FORMAT_VERSION}"
        )
    if total != end + _CHECKSUM:
        raise CorruptEntryError(
            f"its length: expected {total} bytes by its length field, got {len(blob)} bytes"
        )
    if stored_key.hex() != key:
        raise CorruptEntryError(f"it was stored under another key, {stored_key.hex()}")
    if not 0.0 <= cost < _INFINITY:  # a NaN or an infinity would make every sum useless
        raise CorruptEntryError(f"its cost is {cost} seconds")
    position = _HEADER.size + maker_length
    if maker_length or producer:
        maker = blob[_HEADER.size : position]
        if maker != producer:
            raise IncompatibleEntryError(
                f"it was made by another producer, {maker.decode(errors='replace')!r}"
            )
    if count > MAX_SECTIONS or text_length > MAX_METADATA:
        raise CorruptEntryError("it has more sections or metadata than the format allows")
    return cost, count, position, text_length


def _metadata_in(text: bytes) -> dict[str, JSON]:
    metadata = _decode_json(text.decode())
    if b"\\u" in text or text.count(b"[") + text.count(b"{") > _MANY_LEVELS:
        # These raise for lone surrogates, and for deeply nested metadata.
        _compact(metadata).encode()
        _require_shallow(metadata)
    if type(metadata) is not dict:
        raise ValueError("the metadata is not a JSON object")
    return cast("dict[str, JSON]", metadata)


def producer_of(blob: bytes) -> bytes:
    """Return the producer that an envelope names, or `b""` if `blob` is too short for an envelope.

    The envelope must be intact: nothing is checked here.
    """
    if len(blob) < _SMALLEST:
        return b""
    length: int = _HEADER.unpack_from(blob)[6]
    return blob[_HEADER.size : _HEADER.size + length]


class Candidate(NamedTuple):
    """An envelope that a tier has under a key. The caller must decode it to check it.

    Attributes:
        key: the key under which the tier has the envelope.
        envelope: the bytes of the envelope.
        keep: whether the entry, if it is used, is also stored in the user's own cache.
        problem: why the envelope can't be used; None if the tier found no reason.
    """

    key: str
    envelope: bytes
    keep: bool
    problem: CorruptEntryError | None = None


# -- manifests -------------------------------------------------------------------------------------

#: The largest number of dependency sets in a manifest. If there are more, those that were stored
#: least recently are dropped.
MAX_SETS = 16
#: The largest size of a manifest's entry in bytes, not counting its dependency sets.
_ROOM = 2048


def manifest_of(sets: Sequence[bytes]) -> Entry:
    """Return a manifest: the entry with the given dependency sets, most recently stored first."""
    return Entry({f"set{number}": raw for number, raw in enumerate(sets)}, {"kind": "manifest"})


def sets_in(manifest: Entry) -> list[bytes]:
    """Return the dependency sets in a manifest, most recently stored first."""
    names = (f"set{number}" for number in range(MAX_SETS))
    return [manifest.payload[name] for name in takewhile(manifest.payload.__contains__, names)]


def merged(old: Entry, new: Entry, most: int) -> Entry | None:
    """Return a manifest with the sets of `new` that `old` lacks, followed by the sets of `old`.

    These are dependency sets. Return None if `old` lacks none of them. If there are more than
    `MAX_SETS`, or the manifest would have more than `most` bytes, those that were stored least
    recently are dropped, but at least one is kept.
    """
    known = sets_in(old)
    missing = [raw for raw in sets_in(new) if raw not in known]
    sets = (missing + known)[:MAX_SETS]
    while len(sets) > 1 and sum(map(len, sets)) + _ROOM > most:
        sets.pop()
    return manifest_of(sets) if missing else None
