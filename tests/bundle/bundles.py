"""Shared by the tests of bundles: caches with entries that no compiler had to make."""

import io
import os
import random
import sqlite3
from collections.abc import Mapping
from pathlib import Path

from cli.helpers import dependency_set as one_header
from cli.helpers import fill, kernel
from core.helpers import key

import kcache
from kcache import Entry
from kcache.entry import encode
from kcache.nvrtc import PRODUCER
from kcache.nvrtc.manifest import DependencySet, Manifest
from kcache.readonly.bundle_file import write_bundle

REQUEST = key("request")


def dependency_set(number: int = 0) -> DependencySet:
    """Returns a dependency set; another number is another content of the header."""
    return one_header("read.h", number.to_bytes(16, "big"))


def with_headers(*numbers: int, stamped: bool = False, request: str = REQUEST) -> dict[str, Entry]:
    """Returns a manifest of dependency sets, the first one stored last, and their kernels."""
    dependency_sets = [dependency_set(number) for number in numbers]
    if stamped:
        for each in dependency_sets:
            each.stamps["0123"] = b"/home/somebody"
    found = {
        each.result_key(request): _of_request(kernel(300, source="inc.cu"), request)
        for each in dependency_sets
    }
    return {**found, request: Manifest(dependency_sets).to_entry()}


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


def envelope(name: str, entry: Entry) -> bytes:
    return encode(name, entry, producer=PRODUCER.encode())


def written(values: list[tuple[object, object]], folder: Path, *statements: str) -> bytes:
    """Returns a bundle with any rows, and what statements of SQL have done to it."""
    path = folder / f"{os.urandom(4).hex()}.kcb"
    path.touch()
    write_bundle(str(path), values)  # type: ignore[arg-type]
    if statements:
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("PRAGMA writable_schema = ON")
        for statement in statements:
            connection.execute(statement)
        connection.close()
    return path.read_bytes()


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
            return data[:at] + chance.randbytes(to - at) + data[to:]
