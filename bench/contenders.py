"""Contenders: kcache and the caches that it is compared with, each with its documented settings.

All of them take keys of 64 hexadecimal digits, and take and return values as bytes. `needs` skips a
benchmark whose contender is not installed.
"""

import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import pytest
import zstandard

import kcache

KIB = 1 << 10
BACKENDS = ("file", "zstd", "lmdb", "zstd+lmdb")
FILE_STREAM, IN_MEMORY = "cuda.core FileStream", "cuda.core InMemory"
CUPY, DISKCACHE, JAX = "CuPy", "diskcache", "JAX LRUCache"
SQLITE, TRITON = "SQLite", "Triton"
#: A cap so large that it is never reached.
ROOMY = 8 << 30
_NOISE = random.Random(0).randbytes(2 << 20)


class Opened(NamedTuple):
    """An open cache. `size` returns the stored bytes; None for a cache that does not count them."""

    get: Callable[[str], bytes | None]
    put: Callable[[str, bytes], object]
    close: Callable[[], object] = lambda: None
    size: Callable[[], int] | None = None


def key(number: int) -> str:
    return kcache.hash_source(str(number))


def noise(number: int, size: int) -> bytes:
    """Return `size` incompressible bytes, which differ from number to number."""
    start = number * 64 % (len(_NOISE) // 2)
    whole = _NOISE * (1 + size // len(_NOISE)) if size > len(_NOISE) // 2 else _NOISE
    return number.to_bytes(8, "little") + whole[start : start + size - 8]


def needs(*modules: str) -> list[Any]:
    """Import and return modules, or skip the benchmark if one of them can't be imported."""
    try:
        return [import_module(name) for name in modules]
    except (ImportError, OSError) as error:
        pytest.skip(f"{type(error).__name__}: {error}")


# -- kcache ----------------------------------------------------------------------------------------


def ours(folder: Path, cap: int | None, *, backend: str, memory_size: int = 0) -> Opened:
    """Open a kcache engine. Each value is put as an entry with one payload and usual metadata."""
    size = cap or ROOMY
    engine = kcache.open_engine(folder, backend=backend, max_size=size, memory_size=memory_size)

    def get(name: str) -> bytes | None:
        entry = engine.get(name)
        return None if entry is None else entry.payload["cubin"]

    def put(name: str, value: bytes) -> None:
        metadata = {"kind": "kernel", "compile_seconds": 1.0, "arch": "sm_90"}
        if not engine.put(name, kcache.Entry({"cubin": value}, metadata)):  # type: ignore[arg-type]
            raise RuntimeError("not stored")

    return Opened(get, put, engine.close, lambda: engine.size_bytes)


# -- peers -----------------------------------------------------------------------------------------


def cuda_core(folder: Path, cap: int | None, *, kind: str) -> Opened:
    (utils,) = needs("cuda.core.utils")
    arguments = (folder,) if kind == "FileStreamProgramCache" else ()
    cache = getattr(utils, kind)(*arguments, max_size_bytes=cap)
    return Opened(cache.get, cache.__setitem__, cache.close)


def cupy(folder: Path, cap: int | None) -> Opened:
    (module,) = needs("cupy.cuda._compiler_cache")
    del cap  # CuPy's cache has no cap
    cache = module.DiskKernelCacheBackend(str(folder))
    return Opened(cache.load, lambda name, value: cache.save(name, value, ""))


def diskcache(folder: Path, cap: int | None) -> Opened:
    (module,) = needs("diskcache")
    cache = module.Cache(
        str(folder), size_limit=cap or ROOMY, eviction_policy="least-recently-used"
    )
    return Opened(cache.get, cache.set, cache.close, cache.volume)


def jax(folder: Path, cap: int | None) -> Opened:
    module, _ = needs("jax._src.lru_cache", "filelock")
    cache = module.LRUCache(str(folder), max_size=cap or ROOMY)
    return Opened(cache.get, cache.put)


def triton(folder: Path, cap: int | None) -> Opened:
    module, knobs = needs("triton.runtime.cache", "triton.knobs")
    del cap  # Triton's cache has no cap
    knobs.cache.dir = str(folder)

    def get(name: str) -> bytes | None:
        path = module.FileCacheManager(name).get_file("k.cubin")
        return None if path is None else Path(path).read_bytes()

    return Opened(get, lambda name, value: module.FileCacheManager(name).put(value, "k.cubin"))


class Sqlite:
    """The cache that many would write instead, with a single table of SQLite, and well tuned.

    It has a write-ahead log, no fsync per commit, an index on the last use, and a row that holds
    the sum of all sizes.
    """

    def __init__(self, folder: Path, cap: int) -> None:
        self._cap = cap
        self._db = db = sqlite3.connect(folder / "cache.db", timeout=60, isolation_level=None)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.executescript(
            "CREATE TABLE IF NOT EXISTS entry (key PRIMARY KEY, used INT, size INT, value BLOB);"
            "CREATE INDEX IF NOT EXISTS by_use ON entry (used);"
            "CREATE TABLE IF NOT EXISTS held (one INTEGER PRIMARY KEY, bytes INT);"
            "INSERT OR IGNORE INTO held VALUES (1, 0);"
        )
        self.close = db.close

    def get(self, name: str) -> bytes | None:
        row = self._db.execute("SELECT value FROM entry WHERE key = ?", (name,)).fetchone()
        if row is None:
            return None
        self._db.execute("UPDATE entry SET used = ? WHERE key = ?", (time.time_ns(), name))
        return bytes(row[0])

    def put(self, name: str, value: bytes) -> bool:
        if len(value) > self._cap:
            return False
        self._db.execute("BEGIN IMMEDIATE")
        self._add(-self._delete(name))
        row = (name, time.time_ns(), len(value), value)
        self._db.execute("INSERT INTO entry VALUES (?, ?, ?, ?)", row)
        excess = self._add(len(value)) - self._cap
        while excess > 0:
            oldest = self._db.execute("SELECT key FROM entry ORDER BY used LIMIT 1").fetchone()
            freed = self._delete(oldest[0])
            self._add(-freed)
            excess -= freed
        self._db.execute("COMMIT")
        return True

    def size(self) -> int:
        return self._add(0)

    def _delete(self, name: str) -> int:
        rows = self._db.execute("DELETE FROM entry WHERE key = ? RETURNING size", (name,))
        return sum(size for (size,) in rows.fetchall())

    def _add(self, size: int) -> int:
        row = self._db.execute("UPDATE held SET bytes = bytes + ? RETURNING bytes", (size,))
        return int(row.fetchone()[0])


def sqlite(folder: Path, cap: int | None) -> Opened:
    cache = Sqlite(folder, cap or ROOMY)
    return Opened(cache.get, cache.put, cache.close, cache.size)


# -- floors ----------------------------------------------------------------------------------------


def raw_file(folder: Path, cap: int | None, *, packed: bool = False) -> Opened:
    """Use files by system calls alone. A file is written under another name, and then renamed."""
    del cap
    pack, unpack = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()

    def get(name: str) -> bytes:
        descriptor = os.open(f"{folder}/{name}", os.O_RDONLY)
        content = os.read(descriptor, os.fstat(descriptor).st_size)
        os.close(descriptor)
        return unpack.decompress(content) if packed else content

    def put(name: str, value: bytes) -> None:
        path = f"{folder}/{name}"
        descriptor = os.open(path + ".tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(descriptor, pack.compress(value) if packed else value)
        os.close(descriptor)
        os.rename(path + ".tmp", path)

    return Opened(get, put)


def raw_lmdb(folder: Path, cap: int | None) -> Opened:
    """Use LMDB itself, with a transaction and a copy for each call, synchronised as in kcache."""
    del cap
    environment = lmdb.open(str(folder), map_size=ROOMY, metasync=False)

    def get(name: str) -> bytes | None:
        with environment.begin() as transaction:
            found: bytes | None = transaction.get(bytes.fromhex(name))
        return found

    def put(name: str, value: bytes) -> None:
        with environment.begin(write=True) as transaction:
            transaction.put(bytes.fromhex(name), value)

    return Opened(get, put, environment.close)


# -- by name ---------------------------------------------------------------------------------------

OURS = {f"kcache {name}": partial(ours, backend=name) for name in BACKENDS}
MEMORY = "kcache file, memory"
CAPPED = {
    FILE_STREAM: partial(cuda_core, kind="FileStreamProgramCache"),
    DISKCACHE: diskcache,
    JAX: jax,
    SQLITE: sqlite,
}
ON_DISK: dict[str, Callable[[Path, int | None], Opened]] = {
    **OURS,
    **CAPPED,
    CUPY: cupy,
    TRITON: triton,
}
RAW_FILE, RAW_ZSTD, RAW_LMDB = "raw file", "raw file, zstd", "raw LMDB"
EVERYTHING: dict[str, Callable[[Path, int | None], Opened]] = {
    **ON_DISK,
    MEMORY: partial(ours, backend="file", memory_size=1 << 30),
    IN_MEMORY: partial(cuda_core, kind="InMemoryProgramCache"),
    RAW_FILE: raw_file,
    RAW_ZSTD: partial(raw_file, packed=True),
    RAW_LMDB: raw_lmdb,
}


def fill(name: str, folder: Path, count: int, size: int) -> int:
    """Put `count` entries of `size` bytes into a cache; return how many bytes it then stores."""
    entries = ((key(number), noise(number, size)) for number in range(count))
    if name == JAX:  # each of its puts looks at every entry, which would take too long
        _fill_jax(folder, entries)
        return count * size
    opened = EVERYTHING[name](folder, None)
    for entry in entries:
        opened.put(*entry)
    held = int(opened.size()) if opened.size else count * size
    opened.close()
    return held


def _fill_jax(folder: Path, entries: Iterable[tuple[str, bytes]]) -> None:
    """Write two files for each entry, as JAX 0.10 does: the value, and the time of the last use."""
    for number, (name, value) in enumerate(entries, 1):
        (folder / f"{name}-cache").write_bytes(value)
        (folder / f"{name}-atime").write_bytes(number.to_bytes(8, "little"))
