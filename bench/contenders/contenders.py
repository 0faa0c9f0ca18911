"""Contenders: every cache that is compared, behind the same four functions.

`CONTENDERS` has kcache with each backend and the peers, each at the settings that `settings` names.
All of them are given the same keys, 64 hexadecimal digits, and values as bytes; all return bytes.
A peer that can't be imported here is left out by `available`, which says why.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.findings import Absent, Fact
from harness.plan import Found, Plan

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
        settings: what was set, beside the folder and the cap.
        syncs: what a put forces to the disk.
        verifies: what a get checks.
        records: how a get records the use.
        evicts: how a put at the cap finds what to evict.
        on_disk: whether it outlives its process.
        backend: the name of kcache's backend, such as "file"; None for what is none.
    """

    name: str
    role: str
    open: Callable[[Path, int], Opened]
    needs: tuple[str, ...]
    settings: str
    syncs: str
    verifies: str
    records: str
    evicts: str
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


# -- what each does ------------------------------------------------------------------------------


def _kcache(backend: str) -> Contender:
    in_order = backend.endswith("lmdb")
    return Contender(
        f"kcache `{backend}`",
        OURS,
        partial(ours, backend=backend),
        ("kcache",),
        settings="the defaults; `memory_size=0`, so that every get reaches the backend",
        syncs="the data, not LMDB's meta page" if in_order else "nothing",
        verifies="XXH3-128 of the whole entry",
        records="noted, written with a later put" if in_order else "the file's mtime",
        evicts="an index by use" if in_order else "a sample of 2,048 files",
        backend=backend,
    )


MEMORY = Contender(
    "kcache memory",
    OURS,
    partial(ours, backend="file", memory_size=1 << 30),
    ("kcache",),
    settings="`memory_size` of 1 GiB, above `file`",
    syncs="nothing",
    verifies="verified when it was read from the disk",
    records="at most once a minute",
    evicts="a linked list",
    on_disk=False,
)
PEERS = (
    Contender(
        FILE_STREAM,
        PEER,
        file_stream,
        ("cuda.core.utils",),
        settings="`max_size_bytes`",
        syncs="each value",
        verifies="nothing",
        records="the file's atime",
        evicts="a scan of all files",
    ),
    Contender(
        IN_MEMORY,
        PEER,
        in_memory,
        ("cuda.core.utils",),
        settings="`max_size_bytes`",
        syncs="nothing",
        verifies="nothing",
        records="moved to the end of a list",
        evicts="a linked list",
        on_disk=False,
    ),
    Contender(
        DISKCACHE,
        PEER,
        diskcache,
        ("diskcache",),
        settings="`size_limit`, `eviction_policy='least-recently-used'`, else the defaults: "
        "values of 32 KiB and more in files",
        syncs="nothing but checkpoints (`synchronous=NORMAL`)",
        verifies="nothing",
        records="a row written",
        evicts="an index by use",
    ),
    Contender(
        JAX,
        PEER,
        jax,
        ("jax._src.lru_cache", "filelock"),
        settings="`max_size`",
        syncs="nothing",
        verifies="nothing",
        records="a file written",
        evicts="a scan of all files",
    ),
    Contender(
        SQLITE,
        PEER,
        sqlite,
        ("sqlite3",),
        settings="one table written for this benchmark (`bench/contenders/sqlite.py`): WAL, "
        "`synchronous=NORMAL`",
        syncs="nothing but checkpoints (`synchronous=NORMAL`)",
        verifies="nothing",
        records="a row written",
        evicts="an index by use",
    ),
)
CONTENDERS = (*map(_kcache, BACKENDS), *PEERS)
ON_DISK = tuple(contender for contender in CONTENDERS if contender.on_disk)
BY_NAME = {contender.name: contender for contender in (*CONTENDERS, MEMORY)}
#: cuda.core's two caches.
CUDA_CORE = (BY_NAME[FILE_STREAM], BY_NAME[IN_MEMORY])


# -- peers: a table of what each does ------------------------------------------------------------

#: The rows of that table, and the attribute of a `Contender` that fills each.
_ROWS = {
    "opened with": "settings",
    "a put forces to the disk": "syncs",
    "a get verifies": "verifies",
    "a get records the use": "records",
    "a put at the cap finds what to evict by": "evicts",
}


def peers(plan: Plan, folder: Path) -> Found:
    """What a put and a get include in each: read in their sources, not measured.

    Nothing of this is a target, so no fact here has one.
    """
    del plan, folder
    contenders, absent = available("peers", CONTENDERS)
    yield from absent
    yield from _described(contenders)


def _described(contenders: list[Contender]) -> Iterator[Fact]:
    for row, attribute in _ROWS.items():
        for contender in contenders:
            found = getattr(contender, attribute)
            yield Fact("peers", f"{row}: {contender.name}", found, "", met=True)


def peer_module(submodule: str = "") -> ModuleType:
    """Returns `cuda.core` or a submodule of it, such as ".utils".

    Raises RuntimeError, with the extra to install, where it is missing.
    """
    try:
        return import_module("cuda.core" + submodule)
    except ModuleNotFoundError as error:
        raise RuntimeError('cuda.core is not installed; install the extra "bench"') from error
