"""How the contract suite opens each of our backends, and looks at its medium."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from core.helpers import look, path_of

from kcache.backend import Backend
from kcache.testing import BackendContract, MemoryBackend
from kcache_backends.file import FileBackend


class FileSuite(BackendContract):
    """Files, looked at as files."""

    def open(
        self,
        place: Path,
        *,
        max_size: int = 64 << 20,
        read_only: bool = False,
        clock: Callable[[], int] | None = None,
    ) -> Backend:
        clock = clock or time.time_ns
        return FileBackend(place, max_size=max_size, read_only=read_only, clock=clock)

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


class MemorySuite(BackendContract):
    """Values in this process, one backend per place."""

    persistent = False
    shared = False
    _opened: MemoryBackend | None = None

    def open(
        self,
        place: Path,
        *,
        max_size: int = 64 << 20,
        read_only: bool = False,
        clock: Callable[[], int] | None = None,
    ) -> Backend:
        self._opened = MemoryBackend(clock=clock or time.time_ns)
        return self._opened

    def look(self, place: Path) -> Mapping[str, int]:
        assert self._opened is not None
        return {name: len(value) for name, value in self._opened.values.items()}
