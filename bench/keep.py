"""Keep: objects and folders that all laps of a module's benchmarks share."""

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_MEMORY = "/dev/shm"


class Keep(ExitStack):
    """Makes each object once, and keeps it open. Everything is closed when the `Keep` is closed."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[tuple[object, ...], Any] = {}
        #: Its path is short, because the path of a socket in it must be short.
        self.place = self._temporary(None)

    def _temporary(self, parent: str | None) -> Path:
        place = Path(tempfile.mkdtemp(prefix="kb-", dir=parent))
        self.callback(shutil.rmtree, place, ignore_errors=True)
        return place

    def folder(self, *, on_disk: bool = True) -> Path:
        """Return a new empty folder, on a disk or else in memory.

        A folder for many thousands of files should be in memory: if a file system discards the
        blocks of deleted files, each deletion waits for the disk.
        """
        if on_disk or not os.access(_MEMORY, os.W_OK):
            return Path(tempfile.mkdtemp(dir=self.place))
        return self._temporary(_MEMORY)

    def __call__(self, make: Callable[..., T], *arguments: object) -> T:
        """Return `make(self, *arguments)`, which is called only once for the same arguments."""
        key = (make, *arguments)
        if key not in self._made:
            self._made[key] = make(self, *arguments)
        made: T = self._made[key]
        return made
