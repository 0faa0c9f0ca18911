"""FileDigests: compares files with their digests, and trusts a digest while the status is the same.

A digest is trusted without reading the file again while size, mtime, ctime, inode and device are
the same as when the digest was made. A program can't set ctime back. There is one exception: a file
that was changed less than `FRESH_NS` before it was read is read each time until it is older,
because another change within the granularity of the clock would not show. (Git does the same with
its index, see "Racy Git" in git's documentation.)

What another process has verified is trusted only on file systems with a change time that nobody can
set; see `FileSystem.keeps_change_time`. Container images are different: whoever builds an image
chooses the times of its files, and two images often have the same times, inodes and devices, even
below a writable overlay. On such file systems, each process reads each file once, and then trusts
only its own reads.
"""

from __future__ import annotations

import itertools
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from enum import StrEnum
from functools import lru_cache
from typing import TypeAlias

import xxhash

from kcache.util.mounts import file_system

#: size, mtime_ns, ctime_ns, inode, device.
Stamp: TypeAlias = tuple[int, int, int, int, int]

#: Two seconds, the resolution of the coarsest timestamps in use (FAT).
FRESH_NS = 2_000_000_000
#: The stamp of a missing file, or of a file whose status does not prove that it is unchanged.
NO_STAMP: Stamp = (0, 0, 0, 0, 0)
#: The number of bytes of a digest.
SIZE = 16
_MAX_FILES = 65_536
#: A header with more bytes than this is not compared. A kernel that includes such a header is
#: compiled each time.
LARGEST = 1 << 30
#: How many bytes are read at a time from a file that is larger than its status reports.
_PIECE = 1 << 20
#: Directories whose files show the state of the system and of processes. These files are not read
#: here, and a compile that reads them is not cached; see `workers/virtual_files.py`.
OF_PROCESSES = ("/proc/", "/sys/")
#: The flags for opening a file to read it. With them, opening a pipe does not block.
READ_ONLY = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

_COARSE = 5  # CLOCK_REALTIME_COARSE of clock_gettime(2); Python has no name for it


class PathKind(StrEnum):
    """What exists at a path that the compiler has looked for."""

    MISSING = "-"
    #: Nothing exists at the path, and the compiler has tried to open it.
    NOT_OPENED = "a"
    FILE = "f"
    DIRECTORY = "d"
    OTHER = "o"
    ERROR = "e"


def file_clock_ns() -> int:
    """Return the timestamp that a file would get if it changed now, in ns since the epoch.

    On Linux, timestamps of files come from the coarse clock. It advances every 1 to 10 ms, and is
    never ahead of the precise clock.
    """
    if sys.platform == "linux":
        return time.clock_gettime_ns(_COARSE)
    return time.time_ns()


def stamp_of(status: os.stat_result) -> Stamp:
    """Return the part of a file's status that changes whenever the file changes."""
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)


@lru_cache(maxsize=64)
def durable(paths: tuple[str, ...], stamps: tuple[Stamp, ...]) -> tuple[Stamp, ...]:
    """Return `stamps` with `NO_STAMP` in place of each stamp that other processes must not trust.

    A stamp may be trusted if the file system of its file, at the same position in `paths`, keeps a
    change time that nobody can set. The result is cached, because computing it takes as long as
    checking 50 files. The cache's keys are paths and stamps instead of devices, because the number
    of a device is reused after an unmount, when a file has another inode and other times.
    """
    trusted: dict[int, bool] = {NO_STAMP[4]: False}
    found: list[Stamp] = []
    for path, stamp in zip(paths, stamps, strict=False):
        device = stamp[4]
        # A path shows the file system of a device only if its file is on this device now.
        if device not in trusted and _device_of(path) == device:
            trusted[device] = file_system(path).keeps_change_time
        found.append(stamp if trusted.get(device) else NO_STAMP)
    return tuple(found)


def _device_of(path: str) -> int:
    with suppress(OSError):
        return os.stat(path).st_dev
    return NO_STAMP[4]


class FileDigests:
    """Digests of the contents of files (XXH3-128, 16 bytes).

    For each path that was read, the object remembers the digest, and the stamp that the file had
    when it was read. At most `_MAX_FILES` paths are remembered.

    Threads: All methods may be called from several threads at the same time.

    Args:
        clock: returns the timestamp that a file would get if it changed now; by default
            `file_clock_ns`.
    """

    def __init__(self, clock: Callable[[], int] | None = None) -> None:
        self.clock = clock or file_clock_ns
        self._known: dict[str, tuple[Stamp, bytes]] = {}
        #: How often a file or a directory had to be read because its status did not prove that it
        #: was unchanged.
        self.reads = 0

    def read(self, path: str, status: os.stat_result) -> tuple[Stamp, bytes]:
        """Read the file at `path`; return its stamp and the digest of its content.

        The digest may be trusted while the file has this stamp. If no stamp would show a change,
        `NO_STAMP` is returned instead.

        A forged manifest may name any path. Therefore this method opens no files that a compile
        never records: devices, pipes, and files in /proc and /sys. Some of these never end, some
        block the reader, and some have effects when they are opened.

        Args:
            path: the path of the file.
            status: the status of the file a moment ago.

        Raises:
            OSError: the file can't be read, or is of a kind or a size that no header has.
        """
        self.reads += 1
        now = self.clock()
        if os.path.normpath(path).startswith(OF_PROCESSES):
            raise OSError(f"{path} is in /proc or /sys, so it can't be a header")
        _require_regular(path, status)
        fd = os.open(path, READ_ONLY)
        try:
            status = os.fstat(fd)
            _require_regular(path, status)
            content = content_of(fd, status.st_size)
            before, after = stamp_of(status), stamp_of(os.fstat(fd))
        finally:
            os.close(fd)
        unchanged = before == after and len(content) == before[0]
        digest = xxhash.xxh3_128_digest(content)
        return self.remember(path, before if unchanged else NO_STAMP, digest, now)

    def digest(self, path: str, status: os.stat_result) -> bytes:
        """Return the digest of the file at `path`; read the file only if it may have changed.

        `status` is the present status of the file. Raises the same errors as `read`.
        """
        known = self._known.get(path)
        if known is None or known[0] != stamp_of(status):
            known = self.read(path, status)
        return known[1]

    def remember(self, path: str, stamp: Stamp, digest: bytes, read_at: int) -> tuple[Stamp, bytes]:
        """Remember the digest and the stamp of the file at `path`, and return both.

        `read_at` is the time, by `clock`, just before the file was read. If the file had been
        changed shortly before, the stamp might not show another change (see `is_fresh`). Then
        nothing is remembered, and the returned stamp is `NO_STAMP`.
        """
        if is_fresh(stamp, read_at):
            return NO_STAMP, digest
        if len(self._known) >= _MAX_FILES:
            self._known.clear()
        self._known[path] = (stamp, digest)
        return stamp, digest

    def differing(
        self,
        paths: Iterable[str],
        digests: bytes,
        stored: Iterable[Stamp],
        verified: list[Stamp],
    ) -> Iterator[str]:
        """Yield each path whose file can't be read or no longer has its digest.

        Args:
            paths: the paths of the files.
            digests: the digests of the files in the same order, one after the other.
            stored: the stamp that each file had when its digest was last verified, or `NO_STAMP`.
            verified: a list to which the present stamp of each unchanged file is appended.
        """
        get, stat_ = self._known.get, os.stat
        for at, path, stamp in zip(itertools.count(0, SIZE), paths, stored, strict=False):
            digest = digests[at : at + SIZE]
            try:
                status = stat_(path)
                now = stamp_of(status)
                if now == stamp:
                    verified.append(now)
                    continue
                known = get(path)
                if known is None or known[0] != now:
                    known = self.read(path, status)
                if known[1] == digest:
                    verified.append(known[0])
                    continue
            except (OSError, MemoryError):
                pass
            yield path


def is_fresh(stamp: Stamp, read_at: int) -> bool:
    """Return whether a file might keep this `stamp` although it has changed after `read_at`."""
    return stamp == NO_STAMP or max(stamp[1], stamp[2]) >= read_at - FRESH_NS


def _require_regular(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is not a regular file")
    if status.st_size > LARGEST:
        raise OSError(f"{path} is too large for a header: expected at most {LARGEST} bytes")


def content_of(fd: int, size: int) -> bytes:
    """Return the content of the open regular file `fd`, which had `size` bytes a moment ago.

    Raises:
        OSError: the file can't be read, or is too large.
    """
    content = os.read(fd, min(size, LARGEST) + 1)
    while len(content) != size and (more := os.read(fd, _PIECE)):
        content += more
        if len(content) > LARGEST:
            raise OSError(f"the file is too large for a header: expected at most {LARGEST} bytes")
    return content
