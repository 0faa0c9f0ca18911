"""Shared by the tests of bundles: caches with entries that no compiler had to make."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from pathlib import Path

import xxhash
from cli.helpers import fill, kernel, key

import kcache
from kcache import Entry
from kcache.bundle.format import HEAD_SIZE, TRAILER_SIZE
from kcache.entry import encode
from kcache.nvrtc import PRODUCER
from kcache.nvrtc.headers import HeaderSet
from kcache.nvrtc.manifest import Manifest, StoredHeaderSet
from kcache.nvrtc.search import RootedPath

REQUEST = key("request")


def header_set(number: int = 0) -> StoredHeaderSet:
    """Returns a header set; another number is another content of the header."""
    digest = number.to_bytes(16, "big")
    absent = frozenset({RootedPath(0, "read.h")})
    return StoredHeaderSet.of(HeaderSet({RootedPath(1, "read.h"): digest}, absent, frozenset()))


def with_headers(*numbers: int, stamped: bool = False, request: str = REQUEST) -> dict[str, Entry]:
    """Returns a manifest of header sets, the first one stored last, and their kernels."""
    header_sets = [header_set(number) for number in numbers]
    if stamped:
        for each in header_sets:
            each.stamps["0123"] = b"/home/somebody"
    found = {
        each.result_key(request): _of_request(kernel(300, source="inc.cu"), request)
        for each in header_sets
    }
    return {**found, request: Manifest(header_sets).to_entry()}


def _of_request(entry: Entry, request: str) -> Entry:
    return Entry(entry.payload, {**entry.metadata, "request": request})


def kernels(count: int, size: int = 200) -> dict[str, Entry]:
    """Returns kernels for two targets."""
    return {
        key(number): kernel(
            size,
            source=f"k{number}.cu",
            names=[f"k<{number}>"],
            arch=("sm_80", "sm_90")[number % 2],
        )
        for number in range(count)
    }


def export(directory: Path, **options: object) -> bytes:
    """Returns the bundle of a cache."""
    file = io.BytesIO()
    backend = str(options.pop("backend", "file"))
    with kcache.KernelCache(directory, backend=backend, read_only=True) as cache:
        kcache.export_bundle(cache, file, **options)  # type: ignore[arg-type]
    return file.getvalue()


def bundle_of(entries: Mapping[str, Entry], folder: Path) -> bytes:
    """Returns a bundle of entries, by a cache made for it."""
    fill(folder, entries)
    return export(folder)


def contents(directory: Path, backend: str = "file") -> dict[str, Entry]:
    """Returns every entry of a cache, as the backend has it."""
    with kcache.KernelCache(directory, backend=backend, read_only=True, memory_size=0) as cache:
        keys = [info.key for info in cache.engine.backend.scan()]
        found = {name: cache.engine.get(name) for name in keys}
    assert None not in found.values()
    return {name: entry for name, entry in found.items() if entry is not None}


def envelope(name: str, entry: Entry) -> bytes:
    return encode(name, entry, producer=PRODUCER.encode())


def forged(values: list[tuple[bytes, bytes]], head: bytes = b"", **wrong: object) -> bytes:
    """Returns a file whose checksums are right; `wrong` replaces fields of the trailer or rows."""
    head = head or b"KCBUNDLE" + (1).to_bytes(4, "little") + bytes(4)
    data, index = bytearray(head), bytearray()
    for name, value in values:
        offset = wrong.get("offset", len(data))
        size = wrong.get("size", len(value))
        assert isinstance(offset, int)
        assert isinstance(size, int)
        row = name + offset.to_bytes(8, "little") + size.to_bytes(8, "little")
        index += row + xxhash.xxh3_128_digest(value)
        data += value
    data += wrong.get("gap", b"")  # type: ignore[arg-type]
    at, entries = wrong.get("at", len(data)), wrong.get("entries", len(values))
    assert isinstance(at, int)
    assert isinstance(entries, int)
    counted = at.to_bytes(8, "little") + entries.to_bytes(8, "little")
    digest = xxhash.xxh3_128_digest(head + bytes(index) + counted)
    return bytes(data + index) + counted + digest + b"KCBNDEND"


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Returns a bundle with one thing wrong: a bit, a piece that is gone, doubled, or moved."""
    at = chance.randrange(len(data))
    to = min(len(data), at + chance.randrange(1, 200))
    match chance.randrange(6):
        case 0 | 1:
            changed = bytearray(data)
            changed[at] ^= 1 << chance.randrange(8)
            return bytes(changed)
        case 2:
            return data[:at]
        case 3:
            return data[:at] + data[to:]
        case 4:
            return data[:to] + data[at:]
        case _:
            end = len(data) - chance.randrange(1, TRAILER_SIZE + HEAD_SIZE)
            return data[:end] + chance.randbytes(len(data) - end)
