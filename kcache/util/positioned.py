"""pread and pwrite: reading and writing at an offset, also where the system has no such calls."""

from __future__ import annotations

import os
import threading

__all__ = ["pread", "pwrite"]

TYPE_CHECKING = False
if TYPE_CHECKING or hasattr(os, "pread"):
    pread = os.pread
    pwrite = os.pwrite
else:  # Windows; untested there
    _seeking = threading.Lock()

    def pread(fd: int, length: int, offset: int, /) -> bytes:
        """Read up to `length` bytes at `offset`."""
        with _seeking:
            os.lseek(fd, offset, os.SEEK_SET)
            return os.read(fd, length)

    def pwrite(fd: int, data: bytes, offset: int, /) -> int:
        """Write `data` at `offset`; return how many bytes were written."""
        with _seeking:
            os.lseek(fd, offset, os.SEEK_SET)
            return os.write(fd, data)
