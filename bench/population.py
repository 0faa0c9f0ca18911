"""Population: a directory that holds many entries, filled faster than by one put after another.

Entry `number` has the key `key(number)` and was last used before entry `number + 1`. Its bytes are
those that `CacheEngine.put` writes: the envelope, at full length. Files are written straight to
where the file backend keeps them, without its counters, which it then finds out by itself; an LMDB
database is filled by the backend's own `put`, a thousand to a transaction.
"""

import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

from plan import KIB

import kcache
from kcache.entry import encode
from kcache.registry import open_backend

#: A payload starts at another place in this for each number, so that no two are alike.
_NOISE = random.Random(0).randbytes(300 * KIB)
_BATCH = 1_000


def key(number: int) -> str:
    return kcache.hash_source(str(number))


def entry(number: int, payload: int) -> kcache.Entry:
    """Returns an entry with `payload` bytes that do not compress, others for each number."""
    start = number * 64 % (len(_NOISE) - payload)
    head = number.to_bytes(8, "little")
    return kcache.Entry(
        {"cubin": head + _NOISE[start : start + payload - len(head)]},
        {"kind": "kernel", "compile_seconds": 1.0, "arch": "sm_90"},
    )


@dataclass(frozen=True, slots=True)
class Population:
    """`count` entries of `payload` bytes each in a directory, under a cap that they fill.

    Attributes:
        cap: stored bytes of them all.
    """

    directory: Path
    backend: str
    count: int
    payload: int
    cap: int

    @classmethod
    def fill(cls, directory: Path, backend: str, count: int, payload: int) -> "Population":
        """Makes one; `backend` is "file" or "lmdb"."""
        roomy = count * 2 * (payload + 4 * KIB) + KIB
        # Opened first: the engine's own files are there before the entries.
        with kcache.open_engine(directory, backend=backend, max_size=roomy):
            pass
        if backend == "file":
            (directory / "file" / "counters").unlink()
            _write_files(directory / "file", count, payload)
        else:
            _write_lmdb(directory, backend, count, payload, roomy)
        with kcache.open_engine(directory, backend=backend, max_size=roomy) as engine:
            if engine.entry_count != count:
                raise RuntimeError(f"{engine.entry_count} entries instead of {count}")
            return cls(directory, backend, count, payload, max(engine.size_bytes, KIB))

    def open(self) -> kcache.CacheEngine:
        """Returns an engine that is at its cap."""
        return kcache.open_engine(self.directory, backend=self.backend, max_size=self.cap)

    def under(self, wrapper: str) -> "Population":
        """Gives the same files to a wrapper, "zstd" or "zstd+lmdb", which never reads them here."""
        os.rename(self.directory / self.backend, self.directory / wrapper)
        return Population(self.directory, wrapper, self.count, self.payload, self.cap)

    def describe(self) -> str:
        return f"{self.count:,} entries of {self.payload // KIB} KiB"


def new_entries(first: int, count: int, payload: int) -> list[tuple[str, kcache.Entry]]:
    """Returns `count` keys from `first` on, with entries that take turns; their keys differ."""
    entries = [entry(number, payload) for number in range(16)]
    return [(key(first + n), entries[n % len(entries)]) for n in range(count)]


def _write_files(root: Path, count: int, payload: int) -> None:
    for shard in range(256):
        (root / f"{shard:02x}").mkdir(mode=0o700)
    used = time.time_ns() - 1_000_000 * count
    for number in range(count):
        name = key(number)
        fd = os.open(f"{root}/{name[:2]}/{name}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(fd, encode(name, entry(number, payload), producer=b""))
        os.utime(fd, ns=(used + number, used + number))
        os.close(fd)


def _write_lmdb(directory: Path, backend: str, count: int, payload: int, cap: int) -> None:
    opened = open_backend(backend, os.fspath(directory), max_size=cap)
    for first in range(0, count, _BATCH):
        with opened.batch():
            for number in range(first, min(first + _BATCH, count)):
                name = key(number)
                opened.put(name, encode(name, entry(number, payload), producer=b""))
    opened.close()
