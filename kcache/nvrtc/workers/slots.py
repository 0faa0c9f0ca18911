"""Slots: bound the compiles that run at a time on a machine, in all processes of a directory.

A compile may run if it, and each other one that runs, can have a processor of its own among those
that its process is bound to. So nobody waits beside a processor that is idle: two processes that
are bound to different processors run at the same time, and so does a third that may use all.

The file has a header and rows of 256 bytes. A process locks a row while it compiles, and writes
into it: u64, nanoseconds of the system's monotonic clock when it was last alive; 16 bytes, the
owner of the processors; then one bit for each processor, by its number. The kernel releases the
lock of a process that dies. One that was stopped says no more that it is alive, and does not count.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from kcache.directory import open_file_of_cache
from kcache.util.locks import is_locked, lock, pread, pwrite, release
from kcache.util.open_file import OwnFile, has_header

#: Seconds between two looks for a free slot: a twentieth of the time waited, within these limits.
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.025
#: A process counts as stopped when it has not said for this many seconds that it is alive. A worker
#: says so twice a second.
_STOPPED_AFTER = 3.0

_HEADER = b"kcache-slots/1".ljust(16, b"\0")
_ROW = struct.Struct("<Q16s232s")
_ROWS = range(1, 4096)


class Slot:
    """A row that this process has locked, until its file is closed."""

    def __init__(self, file: OwnFile, at: int, processors: Processors) -> None:
        self._file = file
        self._at = at
        self._processors = processors

    def say_alive(self) -> None:
        """Write that this process goes on, for the others that wait.

        Raises:
            OSError: it can't be written.
        """
        bits = sum(1 << number for number in self._processors.numbers)
        row = (time.monotonic_ns(), self._processors.owner, bits.to_bytes(232, "little"))
        pwrite(self._file.fd, _ROW.pack(*row), self._at)

    def release(self) -> None:
        """Let another compile run."""
        release(self._file)


class Slots(NamedTuple):
    """The slots of a directory, as a program tells its workers.

    Processes: the kernel releases the slot of a killed one. If the file can't be opened, or has no
    locks, all compile at once, because slots only keep the machine from being overloaded.

    Attributes:
        path: of the file, which is made.
        patience: seconds to wait for a slot at most; then the compile goes on without one.
    """

    path: str
    patience: float

    @contextmanager
    def held(self) -> Generator[Slot | None]:
        """Hold a slot while the block runs, waiting for one if necessary; None without one."""
        slot = None
        with suppress(OSError, OverflowError):  # more processors than a row has bits
            slot = self._wait()
        try:
            yield slot
        finally:
            if slot is not None:
                slot.release()

    def _wait(self) -> Slot | None:
        started = time.monotonic()
        while (slot := self._take()) is None:
            waited = time.monotonic() - started
            if waited >= self.patience:
                return None
            # Two that tried at the same time have both withdrawn, so the next time must differ.
            share = 0.5 + os.urandom(1)[0] / 512
            time.sleep(share * min(max(waited / 20, _FIRST_PAUSE), _LONGEST_PAUSE))
        return slot

    def _take(self) -> Slot | None:
        """Take a slot, if this compile may run now.

        It says first that it runs, and looks then, as every other does. So of two that come at the
        same time, at least one sees the other.
        """
        processors = usable_processors()
        file = open_file_of_cache(self.path, os.O_RDWR, lambda file: has_header(file, _HEADER))
        if _may_run(processors, _running(file, processors.owner)):
            slot = Slot(file, _lock_row(file), processors)
            slot.say_alive()
            if _may_run(processors, _running(file, processors.owner)):
                return slot
        file.close()
        return None


def _lock_row(file: OwnFile) -> int:
    """Lock a free row; return where it begins."""
    for row in _ROWS:
        with suppress(TimeoutError):  # somebody else has it
            if lock(file, row * _ROW.size, _ROW.size):
                return row * _ROW.size
            raise OSError(errno.ENOLCK, "this file system has no locks")
    raise OSError(errno.EAGAIN, "more compiles run than there are rows")


def _running(file: OwnFile, owner: bytes) -> list[frozenset[int]]:
    """Return the processors of each other compile that runs."""
    rows = pread(file.fd, _ROWS.stop * _ROW.size, 0)
    now = time.monotonic_ns()
    found: list[frozenset[int]] = []
    for at in range(_ROW.size, len(rows) - _ROW.size + 1, _ROW.size):
        alive, whose, bits = _ROW.unpack_from(rows, at)
        goes_on = abs(now - alive) < _STOPPED_AFTER * 1e9
        if whose == owner and goes_on and is_locked(file, at, _ROW.size):
            found.append(_numbers(int.from_bytes(bits, "little")))
    return found


def _numbers(bits: int) -> frozenset[int]:
    return frozenset(number for number in range(bits.bit_length()) if bits >> number & 1)


def _may_run(mine: Processors, others: Sequence[frozenset[int]]) -> bool:
    """Tell whether this compile and all others can each have a processor of its own."""
    if len(others) >= mine.most:
        return False
    users: dict[int, frozenset[int]] = {}

    def seat(numbers: frozenset[int], asked: set[int]) -> bool:
        """Give a compile one of its processors, if need be from one that can use another."""
        free = next(iter(numbers - users.keys()), None)
        if free is not None:
            users[free] = numbers
            return True
        for number in numbers:
            if number not in asked:
                asked.add(number)
                if seat(users[number], asked):
                    users[number] = numbers
                    return True
        return False

    for other in others:
        seat(other, set())
    return seat(mine.numbers, set())


# -- processors --------------------------------------------------------------------------------

#: Control groups, version 2, and version 1.
_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max", None),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Processors(NamedTuple):
    """The processors that a process may use.

    Attributes:
        numbers: those that it may run on, by the system's numbers.
        most: how many of them its container may use at a time.
        owner: 16 bytes that differ between machines, and between containers that have a quota.
    """

    numbers: frozenset[int]
    most: int
    owner: bytes


def usable_cores() -> int:
    """Return how many cores this process may use, by its affinity and its container's quota."""
    usable = usable_processors()
    return min(len(usable.numbers), usable.most)


def usable_processors() -> Processors:
    """Return the processors that this thread, and what it starts, may use."""
    if hasattr(os, "sched_getaffinity"):
        numbers = frozenset(os.sched_getaffinity(0))
    else:
        numbers = frozenset(range(os.cpu_count() or 1))
    quota, owner = _quota()
    return Processors(numbers, sys.maxsize if quota is None else quota, owner)


def _quota() -> tuple[int | None, bytes]:
    """Return the container's quota in whole cores, rounded up, or None; and the quota's owner."""
    for quota_file, period_file in _QUOTAS:
        try:
            with open(quota_file, encoding="ascii") as file:
                numbers = file.read().split()
            if period_file is not None:
                with open(period_file, encoding="ascii") as file:
                    numbers += file.read().split()
            quota, period = map(int, numbers)
            group = os.stat(os.path.dirname(quota_file)).st_ino
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if quota > 0 and period > 0:
            return -(-quota // period), _machine() + group.to_bytes(8, "little")
    return None, _machine() + bytes(8)


def _machine() -> bytes:
    """Return 8 bytes that differ between machines, which may share a directory."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return bytes.fromhex(file.read().replace("-", ""))[:8].ljust(8, b"\0")
    except (OSError, ValueError):
        return bytes(8)
