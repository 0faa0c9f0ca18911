"""The heap of precompiled headers: mapped without its file, and nothing else is."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator

import pytest

from kcache.nvrtc.workers import import_table

if not import_table.supported():
    pytest.skip("import tables can't be changed here", allow_module_level=True)

from kcache.nvrtc.workers.anonymous_heap import AnonymousHeap

SIZE = 64 << 10
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
PRIVATE, FIXED = mmap.MAP_PRIVATE, 0x10


class Table:
    """Stands for a library's import table."""

    def __init__(self) -> None:
        self.pointed: list[tuple[str, int]] = []

    def point(self, name: str, address: int) -> int:
        self.pointed.append((name, address))
        return 1


@pytest.fixture
def room() -> Iterator[int]:
    """The address of memory that may be mapped anew."""
    memory = mmap.mmap(-1, 4 * SIZE)
    place = ctypes.c_char.from_buffer(memory)
    yield ctypes.addressof(place)
    del place
    memory.close()


def file_at(address: int) -> str:
    """Return which file is mapped at an address."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            begin, end = (int(part, 16) for part in fields[0].split("-"))
            if begin <= address < end:
                return fields[5].strip() if len(fields) == 6 else ""
    raise AssertionError


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_heap_has_no_file_behind_it_and_nothing_else_loses_its_own(room: int) -> None:
    heap = AnonymousHeap(Table())  # type: ignore[arg-type]
    with tempfile.NamedTemporaryFile() as ours, tempfile.NamedTemporaryFile() as other:
        for file in (ours, other):
            os.truncate(file.fileno(), SIZE)
        fd = ours.fileno()
        heap.opened(fd)
        assert heap._map(room, SIZE, READ_WRITE, PRIVATE | FIXED, fd, 0) == room
        assert "/tmp" not in file_at(room)
        assert ctypes.string_at(room, SIZE) == bytes(SIZE)
        ctypes.memset(room, 1, SIZE)
        assert os.pread(fd, SIZE, 0) == bytes(SIZE)
        # Shared memory, and another file, are what they were asked to be.
        assert heap._map(room, SIZE, READ_WRITE, mmap.MAP_SHARED | FIXED, fd, 0) == room
        assert file_at(room) == ours.name
        assert heap._map(room, SIZE, READ_WRITE, PRIVATE | FIXED, other.fileno(), 0) == room
        assert file_at(room) == other.name
        # The heap's number may be given to another file.
        kept = os.dup(fd)
        os.dup2(other.fileno(), fd)
        assert heap._map(room, SIZE, READ_WRITE, PRIVATE | FIXED, fd, 0) == room
        assert file_at(room) == other.name
        os.dup2(kept, fd)
        os.close(kept)
        # A mistake is answered as by the system.
        with heap.used():
            pass
        ctypes.set_errno(0)
        assert (
            heap._map(room, SIZE, READ_WRITE, PRIVATE | FIXED, fd, 1) == ctypes.c_void_p(-1).value
        )


def test_the_table_is_as_before_afterwards_and_nothing_stays_open() -> None:
    table = Table()
    heap = AnonymousHeap(table)  # type: ignore[arg-type]
    before = len(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryFile() as file, heap.used():
        heap.opened(file.fileno())
        heap.opened(file.fileno())
        assert [name for name, _ in table.pointed] == ["mmap"]
    assert len(os.listdir("/proc/self/fd")) == before
    real = ctypes.cast(ctypes.CDLL(None).mmap, ctypes.c_void_p).value
    assert table.pointed[-1] == ("mmap", real)
    assert table.pointed[0] != ("mmap", real)
