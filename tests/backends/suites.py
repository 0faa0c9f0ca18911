"""Suites: the contract suite for each backend of kcache, with access to the backend's medium."""

import os
import time
from collections.abc import Callable, Collection, Mapping
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

from core.helpers import look, path_of

from backends import raw
from kcache.backend import Backend
from kcache.testing import BackendContract, MemoryBackend
from kcache_backends.file import FileBackend
from kcache_backends.lmdb import LmdbBackend
from kcache_backends.zstd import ZstdBackend


class DiskSuite(BackendContract):
    """The contract for a backend of kcache that stores values on disk."""

    backend: Callable[..., Backend]

    def open(
        self,
        place: Path,
        *,
        max_size: int = 64 << 20,
        read_only: bool = False,
        clock: Callable[[], int] | None = None,
    ) -> Backend:
        clock = clock or time.time_ns
        return self.backend(place, max_size=max_size, read_only=read_only, clock=clock)


class FileSuite(DiskSuite):
    """The contract for the `file` backend. The tests read the medium as files."""

    backend = FileBackend

    def look(self, place: Path) -> Mapping[str, int]:
        return look(place).entries

    def read_raw(self, place: Path, key: str) -> bytes:
        return path_of(place, key).read_bytes()

    def write_raw(self, place: Path, key: str, image: bytes) -> None:
        path = path_of(place, key)
        status = path.stat()
        path.write_bytes(image)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def leftovers(self, place: Path) -> Collection[object]:
        return look(place).temporary


class LmdbSuite(DiskSuite):
    """The contract for the `lmdb` backend. Another process reads the database for the tests."""

    backend = LmdbBackend

    def look(self, place: Path) -> Mapping[str, int]:
        return {name: _pages(length) for name, length in raw.look(place).items()}

    def read_raw(self, place: Path, key: str) -> bytes:
        return raw.read(place, key)

    def write_raw(self, place: Path, key: str, image: bytes) -> None:
        raw.write(place, key, image)

    def leftovers(self, place: Path) -> Collection[object]:
        return [name for name in ("old",) if (place / name).exists()]

    def snapshot(self, place: Path) -> Mapping[str, object]:
        """Leave out LMDB's table of readers, because read-only use changes this file, too."""
        table = str(place / "db" / "lock.mdb")
        return {path: what for path, what in super().snapshot(place).items() if path != table}


class ZstdFileSuite(FileSuite):
    """The contract for compressed values in files."""

    def open(self, place: Path, **options: Any) -> Backend:
        return ZstdBackend(super().open(place, **options))


class ZstdLmdbSuite(LmdbSuite):
    """The contract for compressed values in LMDB."""

    def open(self, place: Path, **options: Any) -> Backend:
        return ZstdBackend(super().open(place, **options))


def _pages(length: int) -> int:
    """Return the size of the whole pages that LMDB uses for a value of this length."""
    return -(-(length + 16) // PAGESIZE) * PAGESIZE


class MemorySuite(BackendContract):
    """The contract for values in the memory of this process. Each place has its own backend."""

    backend: Callable[..., MemoryBackend] = MemoryBackend
    persistent = False
    shared = False
    _opened: MemoryBackend | None = None

    def open(self, place: Path, **options: Any) -> Backend:
        self._opened = self.backend(clock=options.get("clock") or time.time_ns)
        return self._opened

    def look(self, place: Path) -> Mapping[str, int]:
        return {name: len(value) for name, value in self._opened.values.items()}
