"""AnonymousHeap: the heap that a precompiled header is made in, without a file behind it.

NVRTC maps this heap privately from a temporary file, 64 KiB at a time. Nothing is ever written to
the file but its length. So each new page is read from it, as zeros, and then copied. Anonymous
memory has the same zeros. With it, a precompiled header of CUTLASS, 446 MB, takes 2.2 s of
processor time instead of 2.8 s (NVRTC 13.5), and the gain is larger if the temporary directory is
slow.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress

from kcache.nvrtc.workers.import_table import ImportTable

__all__ = ["AnonymousHeap"]

#: Flags of `mmap`, the same on x86-64 and AArch64 (Linux). The module `mmap` lacks one of them.
_PRIVATE, _FIXED, _ANONYMOUS = 0x02, 0x10, 0x20
_PROTOTYPE = ctypes.CFUNCTYPE(
    ctypes.c_void_p,
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    use_errno=True,
)


class AnonymousHeap:
    """Replaces `mmap` in a compiler's import table while a precompiled header is made.

    One compile at a time.

    Args:
        table: of the compiler's library.
    """

    def __init__(self, table: ImportTable) -> None:
        self._table = table
        self._real = _PROTOTYPE(("mmap", ctypes.CDLL(None, use_errno=True)))
        self._ours = _PROTOTYPE(self._map)
        self._real_address, self._our_address = (
            ctypes.cast(each, ctypes.c_void_p).value or 0 for each in (self._real, self._ours)
        )
        self._fd = self._kept = -1

    @contextmanager
    def used(self) -> Generator[None]:
        """Map the compiler's heap without its file while the block runs."""
        try:
            self._table.point("mmap", self._our_address)
        except OSError:
            yield
            return
        try:
            yield
        finally:
            self._table.point("mmap", self._real_address)
            self._forget()

    def opened(self, fd: int) -> None:
        """Note the descriptor of the heap's file."""
        self._forget()
        with suppress(OSError):
            # As long as it is open, no other file can be taken for it.
            self._kept, self._fd = os.dup(fd), fd

    def _forget(self) -> None:
        if self._kept >= 0:
            os.close(self._kept)
        self._fd = self._kept = -1

    def _map(self, *given: int) -> int | None:
        address, length, protection, flags, fd, offset = given
        with suppress(Exception):  # no exception may get into the compiler
            if self._is_heap(flags, fd):
                flags, fd, offset = flags | _ANONYMOUS, -1, 0
        found: int | None = self._real(address, length, protection, flags, fd, offset)
        return found

    def _is_heap(self, flags: int, fd: int) -> bool:
        if fd != self._fd or fd < 0 or not flags & _PRIVATE or not flags & _FIXED:
            return False
        return os.path.samestat(os.fstat(fd), os.fstat(self._kept))
