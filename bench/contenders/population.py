"""Population: a cache that holds many entries, filled faster than by one put after another.

Entry `number` has the key `key(number)` and was last used before entry `number + 1`. What is on the
disk is what the cache itself would have put there. Caches of one file per entry get their files
written straight to where they keep them, kcache's without its counters, which it then finds out by
itself; databases are filled by their own calls, many to a transaction.
"""

import hashlib
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

from harness.plan import KIB

import kcache
from contenders.contenders import (
    BY_NAME,
    DISKCACHE,
    FILE_STREAM,
    IN_MEMORY,
    JAX,
    SQLITE,
    Contender,
    Opened,
)
from contenders.sqlite import SqliteCache
from kcache.backend import open_backend
from kcache.entry import JSON, encode

#: For each number, a payload starts at another place in these bytes, so that no two are alike.
_NOISE = random.Random(0).randbytes(300 * KIB)
_BATCH = 10_000


def key(number: int) -> str:
    return kcache.hash_source(str(number))


def value(number: int, payload: int) -> bytes:
    """Returns `payload` bytes that do not compress, others for each number."""
    start = number * 64 % (len(_NOISE) - payload)
    head = number.to_bytes(8, "little")
    return head + _NOISE[start : start + payload - len(head)]


def entry(number: int, payload: int) -> kcache.Entry:
    """Returns an entry with that value."""
    metadata: dict[str, JSON] = {"kind": "kernel", "compile_seconds": 1.0, "arch": "sm_90"}
    return kcache.Entry({"cubin": value(number, payload)}, metadata)


@dataclass(frozen=True, slots=True)
class Population:
    """`count` entries of `payload` bytes each in a directory, under a cap that they fill.

    Attributes:
        name: whose it is: the name of a contender.
        cap: what they all take, by that cache's own reckoning.
    """

    name: str
    directory: Path
    count: int
    payload: int
    cap: int

    @classmethod
    def fill(cls, contender: Contender, directory: Path, count: int, payload: int) -> "Population":
        """Makes one."""
        cap = _FILLERS[contender.name](directory, count, payload)
        return cls(contender.name, directory, count, payload, max(cap, KIB))

    @property
    def contender(self) -> Contender:
        return BY_NAME[self.name]

    def open(self) -> Opened:
        """Returns the cache at its cap; one that keeps nothing on the disk is filled first."""
        opened = self.contender.open(self.directory, self.cap)
        if not self.contender.on_disk:
            for number in range(self.count):
                opened.put(key(number), value(number, self.payload))
        return opened


def remove(populations: Iterable[Population]) -> None:
    """Removes them from the disk, several folders at a time.

    A disk that is told of every block that becomes free makes each removal wait for it.
    """
    folders = [found for each in populations for found in each.directory.glob("**")]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(_remove_files, folders))


def _remove_files(folder: Path) -> None:
    with os.scandir(folder) as found:
        paths = [item.path for item in found if not item.is_dir(follow_symlinks=False)]
    for path in paths:
        os.unlink(path)


# -- kcache --------------------------------------------------------------------------------------


def fill_ours(backend: str, directory: Path, count: int, payload: int) -> int:
    """Makes a cache of kcache's with a backend's name; returns what its entries take."""
    roomy = count * 2 * (payload + 4 * KIB) + KIB
    plain = "lmdb" if backend.endswith("lmdb") else "file"
    # Opened first, so that the engine's own files are there before the entries.
    with kcache.open_engine(directory, backend=plain, max_size=roomy):
        pass
    if plain == "file":
        (directory / "file" / "counters").unlink()
        _write_files(directory / "file", count, payload)
    else:
        _write_lmdb(directory, count, payload, roomy)
    with kcache.open_engine(directory, backend=plain, max_size=roomy) as engine:
        if engine.entry_count != count:
            raise RuntimeError(f"{engine.entry_count} entries instead of {count}")
        size = engine.size_bytes
    # A wrapper gets the same files. Compressed noise would not be smaller, and no initial entry is
    # read; they are only evicted.
    if backend != plain:
        os.rename(directory / plain, directory / backend)
    return size


def _write_files(root: Path, count: int, payload: int) -> None:
    for shard in range(256):
        (root / f"{shard:02x}").mkdir(mode=0o700)
    used = _used(count)
    for number in range(count):
        name = key(number)
        blob = encode(name, entry(number, payload), producer=b"")
        _write(f"{root}/{name[:2]}/{name}", blob, used[number])


def _used(count: int) -> range:
    """Returns the time of each entry's last use, in nanoseconds since the epoch.

    A millisecond apart: cuda.core compares them as floats, which tell 200 ns apart.
    """
    start = time.time_ns() - 1_000_000 * count
    return range(start, start + 1_000_000 * count, 1_000_000)


def _write(path: str, content: bytes, used: int) -> None:
    """Writes a file with a time of its last use, in nanoseconds since the epoch."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(fd, content)
    os.utime(fd, ns=(used, used))
    os.close(fd)


def _write_lmdb(directory: Path, count: int, payload: int, cap: int) -> None:
    opened = open_backend("lmdb", os.fspath(directory / "lmdb"), max_size=cap)
    for numbers in _batches(count):
        with opened.batch():
            for number in numbers:
                name = key(number)
                opened.put(name, encode(name, entry(number, payload), producer=b""))
    opened.close()


def _batches(count: int) -> Iterator[range]:
    return (range(first, min(first + _BATCH, count)) for first in range(0, count, _BATCH))


# -- peers ---------------------------------------------------------------------------------------


def _file_stream(directory: Path, count: int, payload: int) -> int:
    """Files at the SHA-256 of their key, as of cuda.core 1.2; their atime is their last use."""
    used = _used(count)
    for number in range(count):
        digest = hashlib.sha256(key(number).encode()).hexdigest()
        folder = directory / "entries" / digest[:2]
        folder.mkdir(parents=True, exist_ok=True)
        _write(f"{folder}/{digest[2:]}", value(number, payload), used[number])
    return count * payload


def _jax(directory: Path, count: int, payload: int) -> int:
    """Two files for each entry, one of them the time of its last use, as of JAX 0.10."""
    directory.mkdir(parents=True, exist_ok=True)
    used = _used(count)
    for number in range(count):
        path = f"{directory}/{key(number)}"
        _write(f"{path}-cache", value(number, payload), used[number])
        _write(f"{path}-atime", (used[number]).to_bytes(8, "little"), used[number])
    return count * payload


def _diskcache(directory: Path, count: int, payload: int) -> int:
    cache = import_module("diskcache").Cache(
        str(directory), size_limit=1 << 40, eviction_policy="least-recently-used"
    )
    for numbers in _batches(count):
        with cache.transact():
            for number in numbers:
                cache.set(key(number), value(number, payload))
    size = int(cache.volume())
    cache.close()
    return size


def _sqlite(directory: Path, count: int, payload: int) -> int:
    cache = SqliteCache(directory, 1 << 40)
    cache.fill((key(number), value(number, payload)) for number in range(count))
    size = cache.used()
    cache.close()
    return size


def _in_memory(directory: Path, count: int, payload: int) -> int:
    del directory
    return count * payload


_FILLERS: dict[str, Callable[[Path, int, int], int]] = {
    **{name: partial(fill_ours, each.backend) for name, each in BY_NAME.items() if each.backend},
    FILE_STREAM: _file_stream,
    IN_MEMORY: _in_memory,
    DISKCACHE: _diskcache,
    JAX: _jax,
    SQLITE: _sqlite,
}
