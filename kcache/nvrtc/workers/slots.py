"""Slots: limits the concurrent compiles of all processes on a machine that share a directory.

A file has a byte for each processor. A process may compile while it holds the lock on the byte of a
processor that it may use. Therefore processes that may use different processors never wait for each
other, and neither do processes on different machines, or in different containers that have a quota.
When a process exits, the operating system releases its lock.

The holder of a lock updates a heartbeat: the time of the system's monotonic clock, as a u64 in
nanoseconds. If the heartbeat is not updated, because the holder is stopped, another process may use
a second byte of the same processor.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import xxhash

from kcache.directory import open_file_of_cache
from kcache.util.cpus import usable_processors
from kcache.util.locks import is_locked, lock, pread, pwrite, release
from kcache.util.open_file import OwnFile, has_header

#: The shortest and the longest pause between two attempts to get a slot, in seconds. In between,
#: the pause is a twentieth of the time waited so far.
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.025
#: A process is considered stopped if its heartbeat is older than this, in seconds. A worker updates
#: it twice a second.
_STOPPED_AFTER = 3.0

_HEADER = b"kcache-slots/2".ljust(16, b"\0")
_HEARTBEAT = 8
#: The number of heartbeats in the file. Two processors, for example of different machines, may have
#: the same heartbeat. Then a stopped process may be considered alive.
_HEARTBEATS = 1024


class Slot:
    """A byte of the file, which its holder locks during a compile."""

    def __init__(self, file: OwnFile, position: int) -> None:
        self._file = file
        self._position = position

    def beat(self) -> None:
        """Update the heartbeat of the slot.

        Raises:
            OSError: the heartbeat can't be written.
        """
        now = time.monotonic_ns().to_bytes(_HEARTBEAT, "little")
        pwrite(self._file.fd, now, self._heartbeat_at())

    def is_stopped(self) -> bool:
        """Return whether the holder of the slot no longer updates the heartbeat.

        Raises:
            OSError: the heartbeat can't be read.
        """
        raw = pread(self._file.fd, _HEARTBEAT, self._heartbeat_at())
        age = time.monotonic_ns() - int.from_bytes(raw, "little")
        return abs(age) > _STOPPED_AFTER * 1e9

    def lock(self) -> bool:
        """Try to lock the byte, without waiting; return whether this succeeded.

        Raises:
            OSError: the file can't be locked or written, or its file system has no locks.
        """
        if is_locked(self._file, self._position):
            return False
        self.beat()  # before the lock: the byte is never locked with an old heartbeat
        with suppress(TimeoutError):
            if lock(self._file, self._position):
                return True
            raise OSError(errno.ENOLCK, "this file system has no locks")
        return False

    def release(self) -> None:
        """Release the lock, so that another compile may run."""
        release(self._file)

    def _heartbeat_at(self) -> int:
        return len(_HEADER) + self._position % _HEARTBEATS * _HEARTBEAT


class Slots(NamedTuple):
    """The slots of a directory, as a program passes them to its workers.

    Crash: When a process is killed, the operating system releases its slot. If the file can't be
    opened, or its file system has no locks, compiles run without a slot and without limit, because
    slots only keep the machine from being overloaded.

    Attributes:
        path: the path of the file, which is created if it does not exist.
        timeout: how many seconds to wait for a slot. After that, the compile runs without a slot.
    """

    path: str
    timeout: float

    @contextmanager
    def held(self) -> Generator[Slot | None]:
        """Wait for a slot, yield it, and hold it during the block.

        If no slot is free in time, or slots can't be used here, None is yielded.
        """
        slot = None
        with suppress(OSError):
            slot = self._wait()
        try:
            yield slot
        finally:
            if slot is not None:
                slot.release()

    def _wait(self) -> Slot | None:
        started = time.monotonic()
        file = open_file_of_cache(self.path, os.O_RDWR, lambda file: has_header(file, _HEADER))
        while (slot := _take(file)) is None:
            waited = time.monotonic() - started
            if waited >= self.timeout:
                return None
            time.sleep(min(max(waited / 20, _FIRST_PAUSE), _LONGEST_PAUSE))
        return slot


def _take(file: OwnFile) -> Slot | None:
    """Return a locked slot of a processor that this process may use, or None if all are busy."""
    numbers, owner = usable_processors()
    first = xxhash.xxh3_64_intdigest(owner) >> 2  # far after the heartbeats
    for number in numbers:
        for second in (0, 1):
            slot = Slot(file, first + 2 * number + second)
            if slot.lock():
                return slot
            if not slot.is_stopped():
                break
    return None
