"""Keep: what the laps of the benchmarks of a module share."""

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
    """Makes each thing once; closes everything at its own end."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[tuple[object, ...], Any] = {}
        #: A short path, for the sockets below it.
        self.place = self._temporary(None)

    def _temporary(self, parent: str | None) -> Path:
        place = Path(tempfile.mkdtemp(prefix="kb-", dir=parent))
        self.callback(shutil.rmtree, place, ignore_errors=True)
        return place

    def folder(self, *, on_disk: bool = True) -> Path:
        """Return a new empty folder.

        One for many thousands of files is better not on a disk: where a file system discards
        blocks, each removal waits for the disk.
        """
        if on_disk or not os.access(_MEMORY, os.W_OK):
            return Path(tempfile.mkdtemp(dir=self.place))
        return self._temporary(_MEMORY)

    def __call__(self, make: Callable[..., T], *arguments: object) -> T:
        """Return what `make` returns for these arguments, made once."""
        key = (make, *arguments)
        if key not in self._made:
            self._made[key] = make(self, *arguments)
        made: T = self._made[key]
        return made
