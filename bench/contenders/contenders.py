"""Contenders: every cache that is compared, behind the same four functions.

`CONTENDERS` has kcache with each backend and the peers, each with its documented settings.
All of them are given the same keys, 64 hexadecimal digits, and values as bytes; all return bytes.
A peer that can't be imported here is left out by `available`, which says why.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.findings import Absent
from harness.plan import Found

import kcache
from contenders.sqlite import SqliteCache
from kcache.entry import JSON

OURS, PEER = "ours", "peer"
FILE_STREAM, IN_MEMORY = "cuda.core FileStream", "cuda.core InMemory"
DISKCACHE, JAX, SQLITE = "diskcache", "JAX LRUCache", "SQLite"
BACKENDS = ("file", "zstd", "lmdb", "zstd+lmdb")
#: In charts that have all four backends, these stand for the wrappers, too. So tables don't become
#: too long.
PLAIN = ("file", "lmdb")
#: A cap that no population here reaches.
ROOMY = 8 << 30

_METADATA: dict[str, JSON] = {"kind": "kernel", "compile_seconds": 1.0, "arch": "sm_90"}


@dataclass(frozen=True, slots=True)
class Opened:
    """A cache that is open.

    Attributes:
        get: returns the value under a key, or None.
        put: puts a value under a key.
        used: returns the bytes that it says it holds; None where it can't say.
        close: ends it.
        engine: kcache's engine; None for a peer.
    """

    get: Callable[[str], bytes | None]
    put: Callable[[str, bytes], object]
    used: Callable[[], int | None]
    close: Callable[[], object]
    engine: kcache.CacheEngine | None = None


@dataclass(frozen=True, slots=True)
class Contender:
    """One of the caches that are compared.

    Attributes:
        name: what it is called in every table and chart.
        role: `OURS` or `PEER`.
        open: opens it in a folder, under a cap in bytes.
        needs: the modules without which it can't be opened.
        on_disk: whether it outlives its process.
        backend: the name of kcache's backend, such as "file"; None for what is none.
    """

    name: str
    role: str
    open: Callable[[Path, int], Opened]
    needs: tuple[str, ...]
    on_disk: bool = True
    backend: str | None = None

    def missing(self) -> str | None:
        """Returns why it can't be used here, in the words of what was raised; None if it can."""
        for name in self.needs:
            try:
                import_module(name)
            except (ImportError, OSError) as error:
                return f"{type(error).__name__}: {error}"
        return None


def available(chapter: str, contenders: "tuple[Contender, ...]") -> tuple[list[Contender], Found]:
    """Returns those that can be used here, and an `Absent` for each of the others."""
    reasons = {contender.name: contender.missing() for contender in contenders}
    absent = (Absent(chapter, name, why) for name, why in reasons.items() if why is not None)
    return [each for each in contenders if reasons[each.name] is None], absent


# -- how each is opened --------------------------------------------------------------------------


def ours(folder: Path, cap: int, *, backend: str, memory_size: int = 0) -> Opened:
    """Opens an engine; what it puts are entries of one payload, the usual metadata beside it."""
    engine = kcache.open_engine(folder, backend=backend, max_size=cap, memory_size=memory_size)

    def get(key: str) -> bytes | None:
        entry = engine.get(key)
        return None if entry is None else entry.payload["cubin"]

    def put(key: str, value: bytes) -> bool:
        return engine.put(key, kcache.Entry({"cubin": value}, _METADATA))

    return Opened(get, put, lambda: engine.size_bytes, engine.close, engine)


def file_stream(folder: Path, cap: int) -> Opened:
    """Opens cuda.core's cache in files. Opening it scans what it holds, so it has no `used`."""
    make = import_module("cuda.core.utils").FileStreamProgramCache
    return _mapping(make(folder, max_size_bytes=cap))


def in_memory(folder: Path, cap: int) -> Opened:
    """Opens cuda.core's cache in memory; the folder stays empty."""
    del folder
    return _mapping(import_module("cuda.core.utils").InMemoryProgramCache(max_size_bytes=cap))


def _mapping(cache: Any) -> Opened:
    return Opened(cache.get, cache.__setitem__, lambda: None, cache.close)


def diskcache(folder: Path, cap: int) -> Opened:
    cache = import_module("diskcache").Cache(
        str(folder), size_limit=cap, eviction_policy="least-recently-used"
    )
    return Opened(cache.get, cache.set, cache.volume, cache.close)


def jax(folder: Path, cap: int) -> Opened:
    """Opens JAX's cache; it looks at what it holds in each put, and has nothing to close."""
    cache = import_module("jax._src.lru_cache").LRUCache(str(folder), max_size=cap)
    return Opened(cache.get, cache.put, lambda: None, lambda: None)


def sqlite(folder: Path, cap: int) -> Opened:
    cache = SqliteCache(folder, cap)
    return Opened(cache.get, cache.put, cache.used, cache.close)


# -- who there is --------------------------------------------------------------------------------


def _kcache(backend: str) -> Contender:
    return Contender(
        f"kcache `{backend}`", OURS, partial(ours, backend=backend), ("kcache",), backend=backend
    )


MEMORY = Contender(
    "kcache memory",
    OURS,
    partial(ours, backend="file", memory_size=1 << 30),
    ("kcache",),
    on_disk=False,
)
PEERS = (
    Contender(FILE_STREAM, PEER, file_stream, ("cuda.core.utils",)),
    Contender(IN_MEMORY, PEER, in_memory, ("cuda.core.utils",), on_disk=False),
    Contender(DISKCACHE, PEER, diskcache, ("diskcache",)),
    Contender(JAX, PEER, jax, ("jax._src.lru_cache", "filelock")),
    Contender(SQLITE, PEER, sqlite, ("sqlite3",)),
)
CONTENDERS = (*map(_kcache, BACKENDS), *PEERS)
ON_DISK = tuple(contender for contender in CONTENDERS if contender.on_disk)
BY_NAME = {contender.name: contender for contender in (*CONTENDERS, MEMORY)}
#: cuda.core's two caches.
CUDA_CORE = (BY_NAME[FILE_STREAM], BY_NAME[IN_MEMORY])


def peer_module(submodule: str = "") -> ModuleType:
    """Returns `cuda.core` or a submodule of it, such as ".utils".

    Raises RuntimeError, with the extra to install, where it is missing.
    """
    try:
        return import_module("cuda.core" + submodule)
    except ModuleNotFoundError as error:
        raise RuntimeError('cuda.core is not installed; install the extra "launch"') from error
