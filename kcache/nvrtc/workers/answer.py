"""Answer: the answer to the compiler about one path; the status has C's layout."""

from __future__ import annotations

import os
import stat
import struct
import sys

from kcache.nvrtc.files import stamp_of

__all__ = ["Answer", "answer_of", "kind_of", "kind_of_status", "size_of_status"]

#: st_mode in `struct stat`, and its size, by machine (glibc, 64 bits).
_LAYOUTS = {"x86_64": (24, 144), "aarch64": (16, 128)}
assert sys.byteorder == "little" or not sys.platform.startswith("linux")


class Answer:
    """The answer to the compiler about one path.

    Attributes:
        kind: `-` nothing there; `a` nothing there, and the compiler tried to open it; `f` a file,
            `d` a directory, `o` anything else, `e` an error.
        error: errno of a failed stat or open.
        stamp: size, mtime, ctime, inode and device; zeros if there is nothing.
        status: bytes of the `struct stat`.
        content: the file's content, once it was opened; None before.
        read: whether the compiler has read any of it, because it also opens files only to see
            whether it can.
        digest: XXH3-128 of that.
    """

    __slots__ = ("content", "digest", "error", "kind", "read", "stamp", "status")

    def __init__(self, kind: str, error: int, stamp: tuple[int, ...], status: bytes) -> None:
        self.kind = kind
        self.error = error
        self.stamp = stamp
        self.status = status
        self.content: bytes | None = None
        self.digest = b""
        self.read = False


def answer_of(status: os.stat_result) -> Answer:
    """Return the answer that a path with this status gets."""
    return Answer(kind_of(status.st_mode), 0, stamp_of(status), _packed(status))


def kind_of(mode: int) -> str:
    """Return `f` for a file, `d` for a directory, `o` for anything else."""
    return "f" if stat.S_ISREG(mode) else "d" if stat.S_ISDIR(mode) else "o"


def size_of_status() -> int:
    """Return how many bytes a `struct stat` has on this machine."""
    return _LAYOUTS[os.uname().machine][1]


def kind_of_status(status: bytes) -> str:
    """Return the kind of file that a `struct stat` describes."""
    mode: int = struct.unpack_from("<I", status, _LAYOUTS[os.uname().machine][0])[0]
    return kind_of(mode)


def _packed(status: os.stat_result) -> bytes:
    """Return the `struct stat` of a file, as the compiler's C library lays it out."""
    seconds, nanoseconds = divmod(status.st_mtime_ns, 10**9)
    changed, changed_ns = divmod(status.st_ctime_ns, 10**9)
    used, used_ns = divmod(status.st_atime_ns, 10**9)
    times = (used, used_ns, seconds, nanoseconds, changed, changed_ns)
    owner = (status.st_uid, status.st_gid)
    if os.uname().machine == "aarch64":
        return struct.pack(
            "<QQIIIIQQqiiq6q8x",
            *(status.st_dev, status.st_ino, status.st_mode, status.st_nlink, *owner),
            *(status.st_rdev, 0, status.st_size, status.st_blksize, 0, status.st_blocks, *times),
        )
    return struct.pack(
        "<QQQIIIIQqqq6q24x",
        *(status.st_dev, status.st_ino, status.st_nlink, status.st_mode, *owner, 0),
        *(status.st_rdev, status.st_size, status.st_blksize, status.st_blocks, *times),
    )
