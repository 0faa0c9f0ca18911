"""FileAnswers: the answers to the compiler about files, one for each path of a compile."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence

import xxhash

from kcache.nvrtc.files import stamp_of
from kcache.nvrtc.workers.answer import Answer, answer_of

__all__ = ["FileAnswers"]

#: Errors which say that there is no file.
_NOTHING = (errno.ENOENT, errno.ENOTDIR)
#: Files of the system with random numbers or the processor's name. They are not recorded.
_SYSTEM = frozenset((b"/dev/urandom", b"/dev/random", b"/proc/cpuinfo"))
#: A path below one of these leads to different files in different processes; `/proc/self/cwd`, for
#: example.
_OF_PROCESSES = (b"/proc/", b"/sys/")


class FileAnswers:
    """The answers of one compile: one for each question, even if the file changes meanwhile.

    Args:
        unfollowed: collects, in words, what can't be recorded.

    Attributes:
        answers: path as asked -> answer.
        written: files that the compiler writes, whose content is its own.
        moved: directories that the compiler knows by another name, (told, real), the longest first;
            see `Recorder.begin`.
    """

    def __init__(self, unfollowed: list[str]) -> None:
        self.unfollowed = unfollowed
        self.answers: dict[bytes, Answer] = {}
        self.written: set[bytes] = set()
        self.moved: Sequence[tuple[bytes, bytes]] = ()

    def _real(self, path: bytes) -> bytes:
        """Return the real path of one that the compiler asks for."""
        for told, real in self.moved:
            if path.startswith(told):
                return real + path[len(told) :]
            if path == told[:-1]:
                return real
        return path

    def look(self, path: bytes) -> Answer:
        """Return the answer about a path; the first one is kept for the whole compile."""
        try:
            status = os.stat(self._real(path))
        except OSError as error:
            number = error.errno or errno.EIO
            kind = "-" if number in _NOTHING else "e"
            answer = Answer(kind, number, (0, 0, 0, 0, 0), b"")
        except ValueError:  # the path can't contain a NUL
            answer = Answer("e", errno.EINVAL, (0, 0, 0, 0, 0), b"")
        else:
            answer = answer_of(status)
        return self.answers.setdefault(path, answer)

    def opened(self, path: bytes) -> Answer | None:
        """Return the content of the file at a path; None if the system has to open it itself."""
        if path in self.written:
            return None
        answer = self.answers.get(path)
        if answer is not None and answer.content is not None:
            return answer
        if path in _SYSTEM:
            return None
        if os.path.normpath(path).startswith(_OF_PROCESSES):
            self.unfollowed.append(f"{os.fsdecode(path)} is no file but the system's own")
            return None
        if answer is not None and answer.kind in "-ae":
            return _sought(answer)
        try:
            fd = os.open(self._real(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            return self._unopened(path, answer, error.errno or errno.EIO)
        try:
            return self._read(path, fd, answer)
        except (OSError, MemoryError) as error:
            self.unfollowed.append(f"{os.fsdecode(path)} can't be read: {error}")
            return None
        finally:
            os.close(fd)

    def _unopened(self, path: bytes, answer: Answer | None, number: int) -> Answer:
        """Return the answer for a path at which nothing can be opened."""
        answer = self.look(path) if answer is None else answer
        if answer.kind in "-ae":
            return _sought(answer)
        if number in _NOTHING:  # it was removed a moment ago
            self.unfollowed.append(f"{os.fsdecode(path)} went while it was opened")
        answer.error = number
        return answer

    def _read(self, path: bytes, fd: int, answer: Answer | None) -> Answer | None:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            if answer is None:
                self.answers[path] = answer_of(status)
            if not stat.S_ISDIR(status.st_mode):
                self.unfollowed.append(f"{os.fsdecode(path)} is no regular file")
            return None
        with open(fd, "rb", buffering=0, closefd=False) as file:
            content = file.read()
        fresh = answer_of(status)
        if answer is not None and answer.stamp[3:] != fresh.stamp[3:]:
            self.unfollowed.append(f"{os.fsdecode(path)} was replaced during the compile")
        if answer is None or answer.stamp != fresh.stamp:
            self.answers[path] = answer = fresh
        if stamp_of(os.fstat(fd)) != answer.stamp or len(content) != answer.stamp[0]:
            # Written just now, so its status can't be trusted.
            answer.stamp = (0, 0, 0, *answer.stamp[3:])
        answer.content = content
        answer.digest = xxhash.xxh3_128_digest(content)
        return answer


def _sought(answer: Answer) -> Answer:
    if answer.kind == "-":
        answer.kind = "a"
    return answer
