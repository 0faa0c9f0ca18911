"""Bundles: creates bundles, and caches whose entries were not compiled."""

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
    """Return a dependency set with one header. The header's content depends on `number`."""
    return one_header("read.h", number.to_bytes(16, "big"))


def with_headers(*numbers: int, stamped: bool = False, request: str = REQUEST) -> dict[str, Entry]:
    """Return a manifest with a dependency set for each number, and the kernels of these sets.

    With `stamped`, each set has a stamp, as if it had been verified at another location.
    """
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
    """Return `count` kernels by key: every other one for sm_80, the others for sm_90."""
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
    """Return the content of a bundle that is exported from the cache in `directory`."""
    file = io.BytesIO()
    backend = str(options.pop("backend", "file"))
    with kcache.KernelCache(directory, backend=backend, read_only=True) as cache:
        kcache.export_bundle(cache, file, **options)  # type: ignore[arg-type]
    return file.getvalue()


def bundle_of(entries: Mapping[str, Entry], folder: Path) -> bytes:
    """Return a bundle of `entries`, which are put into a cache in `folder` and exported from it."""
    fill(folder, entries)
    return export(folder)


def envelope(name: str, entry: Entry) -> bytes:
    return encode(name, entry, producer=PRODUCER.encode())


def written(values: list[tuple[object, object]], folder: Path, *statements: str) -> bytes:
    """Write a bundle of any rows, run SQL statements on its database, and return its content."""
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
    """Return a bundle with one fault: a flipped bit, or a piece that is cut, doubled or random."""
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
