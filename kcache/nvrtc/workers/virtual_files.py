"""VirtualFiles: files and variables as the compiler gets them; they stay the same in a compile."""

from __future__ import annotations

import errno
import os
import stat
import struct
import sys
from collections.abc import Mapping

import xxhash

from kcache import environment
from kcache.nvrtc.files import NO_STAMP, OF_PROCESSES, READ_ONLY, PathKind, content_of, stamp_of

#: Errors of a path that does not exist.
_MISSING = (errno.ENOENT, errno.ENOTDIR)
#: Files of the operating system with random numbers or the processor's name. The compiler opens
#: them itself. They are not recorded, because the result of a compile does not depend on them.
_SYSTEM = frozenset((b"/dev/urandom", b"/dev/random", b"/proc/cpuinfo"))
#: A path in one of these directories, such as `/proc/self/cwd`, may lead to different files in
#: different processes.
_OF_PROCESSES = tuple(map(os.fsencode, OF_PROCESSES))
_IS_AARCH64 = hasattr(os, "uname") and os.uname().machine == "aarch64"
_FAILED = (PathKind.MISSING, PathKind.NOT_OPENED, PathKind.ERROR)
assert sys.byteorder == "little" or not sys.platform.startswith("linux")
_FIXED = {
    os.fsencode(name): None if value is None else os.fsencode(value)
    for name, value in environment.FIXED.items()
}
_IGNORED = frozenset(map(os.fsencode, environment.IGNORED))
_WORKING_DIRECTORY = os.fsencode(environment.WORKING_DIRECTORY)


class PathAnswer:
    """The answer to the compiler about one path.

    Attributes:
        kind: what is at the path.
        error: the errno of a failed stat or open; 0 if neither failed.
        stamp: size, mtime, ctime, inode and device; zeros if stat failed. The first three are zeros
            if the file was changed while it was being read.
        status: the bytes of the C library's `struct stat`; empty if stat failed.
        content: the file's content; None if the compiler has not opened it.
        read: whether the compiler has read any of the content. It may have opened the file only to
            find out whether that is possible.
        digest: XXH3-128 of the content; empty if the compiler has not opened the file.
    """

    __slots__ = ("content", "digest", "error", "kind", "read", "stamp", "status")

    def __init__(self, kind: PathKind, error: int, stamp: tuple[int, ...], status: bytes) -> None:
        self.kind = kind
        self.error = error
        self.stamp = stamp
        self.status = status
        self.content: bytes | None = None
        self.digest = b""
        self.read = False


def answer_of(status: os.stat_result) -> PathAnswer:
    """Return the answer about a path with this `status`."""
    mode = status.st_mode
    kind = PathKind.OTHER
    if stat.S_ISREG(mode):
        kind = PathKind.FILE
    elif stat.S_ISDIR(mode):
        kind = PathKind.DIRECTORY
    return PathAnswer(kind, 0, stamp_of(status), _packed(status))


def _packed(status: os.stat_result) -> bytes:
    """Return `status` as the bytes of the `struct stat` in the compiler's C library."""
    seconds, nanoseconds = divmod(status.st_mtime_ns, 10**9)
    changed, changed_ns = divmod(status.st_ctime_ns, 10**9)
    used, used_ns = divmod(status.st_atime_ns, 10**9)
    times = (used, used_ns, seconds, nanoseconds, changed, changed_ns)
    owner = (status.st_uid, status.st_gid)
    if _IS_AARCH64:
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


class VirtualFiles:
    """The files of one compile: each path has one answer, even if the file changes.

    Args:
        unfollowed: a list to which the questions that can't be recorded are appended, in words.

    Attributes:
        answers: path, as the compiler has spelled it -> answer.
        written: files that the compiler has opened to write them. If it reads such a file later, it
            gets the real file.
    """

    def __init__(self, unfollowed: list[str]) -> None:
        self.unfollowed = unfollowed
        self.answers: dict[bytes, PathAnswer] = {}
        self.written: set[bytes] = set()

    def stat(self, path: bytes) -> PathAnswer:
        """Return the answer about `path`, which stays the same for the whole compile."""
        try:
            status = os.stat(path)
        except OSError as error:
            answer = _failed(error.errno or errno.EIO)
        else:
            answer = answer_of(status)
        return self.answers.setdefault(path, answer)

    def open(self, path: bytes) -> PathAnswer | None:
        """Return the answer to an open of `path`, with the content of the file.

        If the result is None, the compiler has to open the file itself.
        """
        if path in self.written:
            return None
        answer = self.answers.get(path)
        if answer is not None and answer.content is not None:
            return answer
        if path in _SYSTEM:
            return None
        if os.path.normpath(path).startswith(_OF_PROCESSES):
            self.unfollowed.append(f"the compiler reads {os.fsdecode(path)}")
            return None
        if answer is not None and answer.kind in _FAILED:
            return _not_opened(answer)
        try:
            fd = os.open(path, READ_ONLY)
        except OSError as error:
            return self._unopened(path, answer, error.errno or errno.EIO)
        try:
            return self._read(path, fd, answer)
        except (OSError, MemoryError) as error:
            self.unfollowed.append(f"{os.fsdecode(path)} can't be read: {error}")
            return None
        finally:
            os.close(fd)

    def _unopened(self, path: bytes, answer: PathAnswer | None, number: int) -> PathAnswer:
        """Return the answer about `path`, whose open failed with the errno `number`.

        `answer` is the earlier answer about `path`, if there is one.
        """
        if answer is None and number in _MISSING:
            answer = self.answers[path] = _failed(number)
        answer = answer or self.stat(path)
        if answer.kind in _FAILED:
            return _not_opened(answer)
        if number in _MISSING:  # it was removed a moment ago
            self.unfollowed.append(f"{os.fsdecode(path)} was removed during the compile")
        answer.error = number
        return answer

    def _read(self, path: bytes, fd: int, answer: PathAnswer | None) -> PathAnswer | None:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            if answer is None:
                self.answers[path] = answer_of(status)
            if not stat.S_ISDIR(status.st_mode):
                self.unfollowed.append(f"{os.fsdecode(path)} is not a regular file")
            return None
        content = content_of(fd, status.st_size)
        stamp = stamp_of(status)
        if answer is not None and answer.stamp[3:] != stamp[3:]:
            self.unfollowed.append(f"{os.fsdecode(path)} was replaced during the compile")
        if answer is None or answer.stamp != stamp:
            self.answers[path] = answer = answer_of(status)
        if stamp_of(os.fstat(fd)) != stamp or len(content) != stamp[0]:
            # The file was changed while it was being read, so its status can't be trusted.
            answer.stamp = (0, 0, 0, *stamp[3:])
        answer.content = content
        answer.digest = xxhash.xxh3_128_digest(content)
        return answer


def _failed(number: int) -> PathAnswer:
    """Return the answer about a path whose stat or open has failed with the errno `number`."""
    kind = PathKind.MISSING if number in _MISSING else PathKind.ERROR
    return PathAnswer(kind, number, NO_STAMP, b"")


def _not_opened(answer: PathAnswer) -> PathAnswer:
    if answer.kind == PathKind.MISSING:
        answer.kind = PathKind.NOT_OPENED
    return answer


class VirtualEnvironment:
    """The environment that the compiler gets.

    Attributes:
        asked: name -> value of each variable that the compiler has asked for, in all compiles so
            far, because the compiler remembers some of the values.
    """

    def __init__(self) -> None:
        self.asked: dict[bytes, bytes | None] = {}
        self._variables: Mapping[bytes, bytes] = {}
        self._directory = b"/"

    def begin(self, variables: Mapping[bytes, bytes], directory: bytes) -> None:
        """Set the variables and the working directory for the next compile."""
        self._variables = variables
        self._directory = directory

    def get(self, name: bytes) -> bytes | None:
        """Return the value of the variable `name` for the compiler; None if it is not set."""
        value = self._value(name, self._variables, self._directory)
        if name not in _FIXED and name not in _IGNORED:
            self.asked[name] = value
        return value

    def has_changed(self, variables: Mapping[bytes, bytes], directory: bytes) -> bool:
        """Return whether a variable that the compiler has asked for would have another value now.

        `variables` and `directory` are those of the next compile.
        """
        return any(
            self._value(name, variables, directory) != value for name, value in self.asked.items()
        )

    def _value(
        self, name: bytes, variables: Mapping[bytes, bytes], directory: bytes
    ) -> bytes | None:
        if name in _FIXED:
            return _FIXED[name]
        value = variables.get(name)
        if name == _WORKING_DIRECTORY and (value is None or not _same(value, directory)):
            # LLVM asks for `PWD` to find out how the user spells the working directory. If `PWD`
            # names another directory, LLVM uses `getcwd`, which gives the same as this.
            return directory
        return value


def _same(path: bytes, directory: bytes) -> bool:
    """Return whether `path` is absolute and leads to `directory`, in any spelling."""
    try:
        return path == directory or (path[:1] == b"/" and os.path.samefile(path, directory))
    except OSError:
        return False
