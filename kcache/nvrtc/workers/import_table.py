"""ImportTable: redirects the calls that a loaded library makes to functions of other libraries.

A shared library calls functions of other libraries through slots in its own data, into which the
dynamic loader writes the addresses of the functions (its global offset table; ELF gABI, "Dynamic
Linking"; System V psABI for x86-64 and AArch64, "Relocation"). A process may write other addresses
into these slots. The library's code is not changed.
"""

from __future__ import annotations

import ctypes
import os
import struct

from kcache.nvrtc.library import mapped

_PT_DYNAMIC = 2
_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ, _DT_JMPREL = 2, 5, 6, 7, 8, 23
#: The tag of the number of relocations at the beginning of `_DT_RELA` that name no symbol. Nearly
#: all relocations are of this kind, so they are skipped.
_DT_RELACOUNT = 0x6FFFFFF9
#: Relocations that put a function's address into a slot: GLOB_DAT, JUMP_SLOT, 64-bit absolute.
_RELOCATIONS = {"x86_64": (6, 7, 1), "aarch64": (1025, 1026, 257)}
_PROT_READ_WRITE = 3
_LONGEST_NAME = 256


class ImportTable:
    """The slots through which one loaded library calls functions of other libraries.

    Args:
        path: the path of the library, as `/proc/self/maps` has it.

    Raises:
        OSError: the library is not loaded.
        ValueError: the library's image has another format.
        LookupError: the image lacks a table, or this processor is not supported.
    """

    def __init__(self, path: str) -> None:
        base = mapped().get(path)
        if base is None:
            raise OSError(f"{path} is not loaded")
        self._base = base
        tags = self._dynamic()
        self._strings, self._symbols = tags[_DT_STRTAB], tags[_DT_SYMTAB]
        #: name of a function -> addresses of its slots.
        self.slots: dict[str, list[int]] = {}
        kinds = _RELOCATIONS[os.uname().machine]
        nameless = 24 * tags.get(_DT_RELACOUNT, 0)
        for table, size, skip in ((_DT_JMPREL, _DT_PLTRELSZ, 0), (_DT_RELA, _DT_RELASZ, nameless)):
            if table in tags:
                self._read_relocations(tags[table] + skip, tags.get(size, 0) - skip, kinds)

    def point(self, name: str, address: int) -> int:
        """Redirect the library's calls of the function `name` to `address`.

        Returns the number of slots that were changed, which is 0 if there are no such calls.

        Raises:
            OSError: a slot can't be written.
        """
        slots = self.slots.get(name, ())
        page = os.sysconf("SC_PAGE_SIZE")
        libc = ctypes.CDLL(None, use_errno=True)
        for slot in slots:
            start = slot & ~(page - 1)
            if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(page), _PROT_READ_WRITE):
                what = f"the slot of the function {name} can't be made writable"
                raise OSError(ctypes.get_errno(), what)
            ctypes.c_uint64.from_address(slot).value = address
        return len(slots)

    def _dynamic(self) -> dict[int, int]:
        head = ctypes.string_at(self._base, 64)
        if head[:6] != b"\x7fELF\x02\x01":
            raise ValueError("the library is not a 64-bit little-endian ELF image")
        (offset,) = struct.unpack_from("<Q", head, 32)
        size, count = struct.unpack_from("<HH", head, 54)
        for number in range(count):
            raw = ctypes.string_at(self._base + offset + size * number, 56)
            kind, _, _, address, _, _, length, _ = struct.unpack("<IIQQQQQQ", raw)
            if kind == _PT_DYNAMIC:
                pairs = struct.iter_unpack("<qQ", ctypes.string_at(self._base + address, length))
                return {tag: value for tag, value in pairs if tag}
        raise ValueError("the library has no dynamic section")

    def _read_relocations(self, table: int, size: int, kinds: tuple[int, ...]) -> None:
        for offset, info, _ in struct.iter_unpack("<QQq", ctypes.string_at(table, size)):
            if info & 0xFFFFFFFF not in kinds or not info >> 32:
                continue
            (at,) = struct.unpack("<I", ctypes.string_at(self._symbols + 24 * (info >> 32), 4))
            name = ctypes.string_at(self._strings + at)[:_LONGEST_NAME].decode("latin-1")
            self.slots.setdefault(name, []).append(self._base + offset)
