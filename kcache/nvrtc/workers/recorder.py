"""Recorder: records what one compile asks the operating system, and the answers.

The result of a compile depends only on its request and on the answers that it gets. If every
question gets the same answer as before, the next question is the same, and so is the result. (Such
a trace is a *verifying trace*; see Mokhov, Mitchell, Peyton Jones, "Build systems a la carte",
2018.) The recorder redirects the compiler's calls of libc through its import table. It

- gives the same answer to the same question during a compile, so that the result belongs to one
  state of the files even while they are changed;
- gives the compiler the bytes that were hashed, so that the compiler does not read the file itself;
- records the answers;
- poisons the clock: a kernel that shows the date or the time of its compile must not be cached, and
  `ctime` is the only source of both (see `POISON`).

A question that can't be answered like this (about a pipe, a process to start, a file to write) is
passed to the operating system and recorded as unfollowed: the result is not cached.

According to strace, NVRTC 12.4 to 13.5 call only `fopen`, `__xstat`, `getenv`, `getcwd` and
functions for the time; with precompiled headers, they also write files. Many other functions, which
a future release might call, are redirected only to record a call as unfollowed.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from kcache.nvrtc.workers.import_table import ImportTable
from kcache.nvrtc.workers.messages import Reply, Status
from kcache.nvrtc.workers.virtual_files import PathAnswer, VirtualEnvironment, VirtualFiles

#: The answer to `ctime`. NVRTC cuts `__DATE__` and `__TIME__` out of it by position (12.4 to 13.5).
#: Each of the two contains an incomplete universal character name. If an expansion of `__DATE__` or
#: `__TIME__` reaches the parser or is stringized, NVRTC reports an error that no option suppresses.
#: If the expansion is dropped, it changes nothing. If it is stringized twice, the outputs contain
#: the poison; see `_SHOWN`. The text after the line break only becomes part of the hash that names
#: of internal symbols contain.
POISON = b'Fri "\\u04" "\\u042"+ xxxx\n'
#: The message of that error.
_POISONED = b"incorrectly formed universal character name"
#: Match the poison in a literal, both as bytes and as the numbers that PTX has for bytes. A pattern
#: that begins with plain text is ten times as fast.
_SHOWN = (
    re.compile(rb'u04(?:\\*" xxxx|2\\*"\+)'),
    re.compile(rb"117, 48, 52(?:(?:, 92)*, 34, 32, 120|, 50(?:, 92)*, 34, 43)"),
)
#: The process id that the compiler gets in every worker. It is always the same, because NVRTC puts
#: it into the names of internal symbols if a source exports no name of its own.
PROCESS_ID = 10_007
#: The beginning of the names of directories for automatic precompiled headers (`--pch`).
_AUTOMATIC = b"__nvrtc_auto_pch_"
#: The number of the system call gettid, which LLVM makes thousands of times in a compile.
_GETTID = {"x86_64": 186, "aarch64": 178}
#: The numbers of other system calls that do not depend on files: futex, getrandom, sched_*.
_HARMLESS_CALLS = {
    "x86_64": frozenset((24, 28, 202, 203, 204, 228, 230, 309, 318, 324)),
    "aarch64": frozenset((98, 113, 115, 122, 123, 124, 168, 233, 278, 283)),
}

_POINTER, _TEXT, _INT, _LONG = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_long


class Recorder:
    """The hooks in a compiler's import table, and the trace of the running compile.

    Threads: Only one compile may run at a time, but the compiler's own threads may call the hooks
    at the same time.

    Args:
        library: the path of the loaded library, as `/proc/self/maps` has it.

    Attributes:
        environment: the variables that the compiler gets.
        unfollowed: the questions that could not be recorded, in words.
        real_process_id: whether the compiler gets its real process id. It has to for automatic
            precompiled headers, because NVRTC puts the id into the names of their directories.
    """

    def __init__(self, library: str) -> None:
        self.environment = VirtualEnvironment()
        self.unfollowed: list[str] = []
        self._files = VirtualFiles(self.unfollowed)
        self.real_process_id = False
        #: Whether questions are passed to the operating system without being recorded.
        self.paused = False
        #: The poisoned answer to `ctime`; None for the true one.
        self._poison: ctypes.Array[ctypes.c_char] | None = None
        self._values: dict[bytes, Any] = {}
        #: Streams that the compiler has open: address -> the answer whose bytes it reads.
        self._streams: dict[int, PathAnswer] = {}
        #: Keeps the hooks alive, because the compiler calls them.
        self._kept: list[object] = []
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._gettid = _GETTID[os.uname().machine]
        self._harmless = _HARMLESS_CALLS[os.uname().machine]
        self._table = ImportTable(library)
        self._fmemopen = self._function("fmemopen", _POINTER, _POINTER, ctypes.c_size_t, _TEXT)
        self._ftell = self._function("ftell", _LONG, _POINTER)
        self._hook_all()

    def begin(self, environment: Mapping[bytes, bytes], directory: bytes, clock: str = "") -> None:
        """Clear the trace of the last compile, and prepare for the next one.

        Args:
            environment: the variables that the compiler gets.
            directory: the working directory.
            clock: digits to append to the poisoned clock; empty to use the true clock.
        """
        self.files.clear()
        self.unfollowed.clear()
        self._streams.clear()
        self._files.written.clear()
        self.environment.begin(environment, directory)
        self._poison = ctypes.create_string_buffer(POISON + clock.encode()) if clock else None
        if clock and "ctime" not in self._table.slots:
            self.unfollowed.append("this NVRTC does not ask `ctime` for the date and the time")

    @property
    def files(self) -> dict[bytes, PathAnswer]:
        """The answers about files: path, as the compiler has spelled it -> answer."""
        return self._files.answers

    def note(self, path: bytes) -> None:
        """Record that the result depends on whether something exists at `path`, and on its kind."""
        self._files.stat(path)

    def digest_of(self, answer: PathAnswer) -> bytes:
        """Return the digest of the file's content, or empty if the compiler has read none of it."""
        still_open = any(each is answer for each in self._streams.values())
        return answer.digest if answer.read or still_open else b""

    def effects(self) -> str:
        """Return what could not be followed, in words; empty if everything was followed."""
        return ", ".join(dict.fromkeys(self.unfollowed))

    def is_poisoned(self, reply: Reply) -> bool:
        """Return whether the result of the compile depends on the poisoned clock."""
        log = reply.artifact.raw_log or b""
        if reply.status == Status.REJECTED:
            return _POISONED in log
        texts = (log, *reply.artifact.outputs.values())
        return any(each.search(text) for each in _SHOWN for text in texts)

    # -- what the compiler calls -----------------------------------------------------------------

    def _hook_all(self) -> None:
        status, text, number = _POINTER, _TEXT, _INT
        for names, hook, result, arguments in (
            ("fopen fopen64", self._fopen, _POINTER, (text, text)),
            ("fclose", self._fclose, number, (_POINTER,)),
            ("open open64", self._open, number, (text, number, number)),
            ("__xstat __xstat64", self._xstat, number, (number, text, status)),
            ("stat stat64", self._stat, number, (text, status)),
            ("getenv secure_getenv", self._getenv, _POINTER, (text,)),
            ("syscall", self._syscall, _LONG, (_LONG,) * 7),
            ("mkstemp", self._mkstemp, number, (_POINTER,)),
            ("getpid", self._getpid, number, ()),
            ("ctime", self._ctime, _POINTER, (_POINTER,)),
            ("unlink remove rmdir system", self._effect, number, (text,)),
            ("mkdir", self._effect, number, (text, number)),
            ("rename link symlink", self._effect, number, (text, text)),
            ("execv execve execvp", self._effect, number, (text, _POINTER, _POINTER)),
            ("connect bind", self._effect, number, (number, _POINTER, number)),
            ("fork", self._effect, number, ()),
            ("access opendir readlink realpath scandir glob", self._unseen, _LONG, (_LONG,) * 6),
            ("lstat lstat64 __lxstat __lxstat64 statx", self._unseen, _LONG, (_LONG,) * 6),
            ("fstatat __fxstatat ftw nftw openat openat64", self._unseen, _LONG, (_LONG,) * 6),
            ("asctime ctime_r gmtime gmtime_r localtime", self._unseen, _LONG, (_LONG,) * 6),
            ("localtime_r strftime __strftime_l", self._unseen, _LONG, (_LONG,) * 6),
        ):
            for name in names.split():
                self._hook(name, hook, result, *arguments)

    def _function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:  # noqa: ANN401
        kind: Any = ctypes.CFUNCTYPE(result, *arguments, use_errno=True)
        function: Callable[..., Any] = kind((name, self._libc))
        return function

    def _hook(self, name: str, hook: Callable[..., Any], result: Any, *arguments: Any) -> None:  # noqa: ANN401
        """Redirect the compiler's calls of `name` to `hook(real, *arguments)`."""
        if name not in self._table.slots:
            return
        real = self._function(name, result, *arguments)
        hooked = partial(hook, name) if hook in (self._effect, self._unseen) else hook

        def call(*given: Any) -> Any:  # noqa: ANN401  as the C function's
            if self.paused:
                return real(*given)
            try:
                return hooked(real, *given)
            except Exception as error:
                # Otherwise ctypes would return 0, which means a descriptor or success.
                self.unfollowed.append(f"the call of {name} can't be followed: {error!r}")
                return real(*given)

        kind: Any = ctypes.CFUNCTYPE(result, *arguments, use_errno=True)
        function = kind(call)
        self._kept += [real, function]
        self._table.point(name, ctypes.cast(function, _POINTER).value or 0)

    def _fopen(self, real: Callable[..., Any], path: bytes, mode: bytes) -> int | None:
        if not mode.startswith(b"r") or b"+" in mode:
            self._writes(path)
            return real(path, mode)  # type: ignore[no-any-return]
        answer = self._files.open(path)
        if answer is None:
            return real(path, mode)  # type: ignore[no-any-return]
        if answer.content is None:
            ctypes.set_errno(answer.error)
            return None
        if not answer.content:  # old C libraries reject a stream without bytes
            answer.read = True
            return real(b"/dev/null", mode)  # type: ignore[no-any-return]
        # The compiler reads these bytes directly, and `self.files` keeps them in place.
        stream: int | None = self._fmemopen(answer.content, len(answer.content), b"r")
        if not stream:
            self.unfollowed.append(f"{os.fsdecode(path)} can't be read from memory")
            return real(path, mode)  # type: ignore[no-any-return]
        self._streams[stream] = answer
        return stream

    def _fclose(self, real: Callable[..., Any], stream: int) -> int:
        answer = self._streams.pop(stream, None)
        if answer is not None and not answer.read:
            answer.read = self._ftell(stream) != 0
        return real(stream)  # type: ignore[no-any-return]

    def _open(self, real: Callable[..., Any], path: bytes, flags: int, mode: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            self._writes(path)
        else:
            self.unfollowed.append(f"the compiler opens {os.fsdecode(path)} in an unknown way")
        return real(path, flags, mode)  # type: ignore[no-any-return]

    def _writes(self, path: bytes) -> None:
        self.unfollowed.append(f"the compiler writes {os.fsdecode(path)}")
        self._files.written.add(path)
        self.files.pop(path, None)

    def _xstat(self, real: Callable[..., Any], version: int, path: bytes, status: int) -> int:
        return self._stat(partial(real, version), path, status)

    def _stat(self, real: Callable[..., Any], path: bytes, status: int) -> int:
        answer = self._files.answers.get(path)
        if answer is None:
            if path in self._files.written:
                return real(path, status)  # type: ignore[no-any-return]
            answer = self._files.stat(path)
        if not answer.status:
            ctypes.set_errno(answer.error)
            return -1
        ctypes.memmove(status, answer.status, len(answer.status))
        return 0

    def _getenv(self, real: Callable[..., Any], name: bytes) -> int | None:
        value = self.environment.get(name)
        if value is None:
            return None
        kept = self._values.get(value)
        if kept is None:
            kept = self._values[value] = ctypes.create_string_buffer(value)
        return ctypes.addressof(kept)

    def _syscall(self, real: Callable[..., Any], number: int, *arguments: int) -> int:
        if number == self._gettid:
            return threading.get_native_id()
        if number not in self._harmless:
            self.unfollowed.append(f"the compiler makes the system call {number}")
        return real(number, *arguments)  # type: ignore[no-any-return]

    def _getpid(self, real: Callable[..., Any]) -> int:
        return real() if self.real_process_id else PROCESS_ID

    def _ctime(self, real: Callable[..., Any], when: int) -> int | None:
        return real(when) if self._poison is None else ctypes.addressof(self._poison)

    def tidy(self) -> None:
        """Remove automatic precompiled headers, which NVRTC would keep until the process exits."""
        for path in self._files.written:
            folder = os.path.dirname(path)
            if os.path.basename(folder).startswith(_AUTOMATIC):
                with suppress(OSError):
                    os.unlink(path)
                    os.rmdir(folder)

    def _mkstemp(self, real: Callable[..., Any], template: int) -> int:
        fd: int = real(template)
        self.unfollowed.append(f"the compiler writes {os.fsdecode(ctypes.string_at(template))}")
        return fd

    def _effect(self, name: str, real: Callable[..., Any], *given: Any) -> int:  # noqa: ANN401
        what = os.fsdecode(given[0]) if given and isinstance(given[0], bytes) else ""
        self.unfollowed.append(f"the compiler calls {name}({what})")
        return real(*given)  # type: ignore[no-any-return]

    def _unseen(self, name: str, real: Callable[..., Any], *given: Any) -> int:  # noqa: ANN401
        self.unfollowed.append(f"the compiler calls {name}, which kcache can't follow")
        return real(*given)  # type: ignore[no-any-return]
