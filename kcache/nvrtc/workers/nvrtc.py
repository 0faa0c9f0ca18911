"""Nvrtc: calls the C interface of an NVRTC library by ctypes, for one program at a time."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress

from kcache.nvrtc import library as libraries
from kcache.nvrtc import text_of_log
from kcache.nvrtc.artifact import Artifact
from kcache.nvrtc.workers.messages import Ask, Hello, Reply, Status

_SUCCESS = 0


class _RejectedError(Exception):
    """NVRTC rejected a call; the attribute `reply` contains NVRTC's error."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.text)
        self.reply = reply


class Nvrtc:
    """One loaded NVRTC library.

    Only one thread may use the object at a time. A compile releases the GIL.

    Args:
        path: the path of the library.

    Raises:
        OSError: the library can't be loaded, or its file was replaced while it was being loaded.
    """

    def __init__(self, path: str) -> None:
        self._identity = libraries.at(path).identity
        _load_builtins(path)
        self._library = library = ctypes.CDLL(path)
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        if libraries.at(path).identity != self._identity:
            raise OSError(f"{path} was replaced while it was being loaded")

    def hello(self) -> Hello:
        """Return the library's identity, its version and its architectures in ascending order."""
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._library.nvrtcGetSupportedArchs(archs)
        return Hello(self._identity, (major.value, minor.value), tuple(archs))

    def install_headers(self, folder: bytes) -> bool:
        """Install the compiler's own headers in `folder`, and return whether they are there now.

        If they are there already, nothing is installed.
        """
        install = getattr(self._library, "nvrtcInstallBundledHeaders", None)
        return install is not None and install(folder, 0, None) == _SUCCESS

    def compile(self, ask: Ask) -> Reply:
        """Compile the request `ask`, and return the reply.

        The reply has all outputs that the flags select, or NVRTC's error if NVRTC rejects a call.
        """
        names = [name.encode() for name in ask.names]
        try:
            with self._program(ask) as program:
                for each in names:
                    code = self._library.nvrtcAddNameExpression(program, each)
                    self._check(code, f"add the name expression {each.decode()!r}")
                done = self._compile(program, ask.flags)
                lowered = (self._lowered(program, each) for each in names)
                ptx = self._output(program, "PTX") or b""
                artifact = done._replace(
                    ptx=ptx.rstrip(b"\0") or None,
                    cubin=self._output(program, "CUBIN"),
                    ltoir=self._output(program, "LTOIR"),
                    lowered_names=dict(zip(ask.names, lowered, strict=True)),
                )
        except _RejectedError as error:
            return error.reply
        return Reply(Status.COMPILED, artifact)

    @contextmanager
    def _program(self, ask: Ask) -> Generator[ctypes.c_void_p]:
        program = ctypes.c_void_p()
        texts, names = _strings([*ask.headers.values()]), _strings([*ask.headers])
        source, name = ask.source.encode(), ask.source_name.encode()
        code = self._library.nvrtcCreateProgram(
            ctypes.byref(program), source, name, len(ask.headers), texts, names
        )
        self._check(code, "create a program")
        try:
            yield program
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _compile(self, program: ctypes.c_void_p, flags: Sequence[str]) -> Artifact:
        """Compile `program`; return an artifact with only the log and the time of the compile."""
        started = time.perf_counter()
        code = self._library.nvrtcCompileProgram(program, len(flags), _strings(flags))
        seconds = time.perf_counter() - started
        log = self._output(program, "ProgramLog") or b""
        done = Artifact(raw_log=log if text_of_log(log) else None, seconds=seconds)
        if code != _SUCCESS:
            raise self._rejected(code, "", done)
        return done

    def _output(self, program: ctypes.c_void_p, what: str) -> bytes | None:
        size = ctypes.c_size_t()
        get_size = getattr(self._library, f"nvrtcGet{what}Size", None)
        if get_size is None or get_size(program, ctypes.byref(size)) != _SUCCESS or not size.value:
            return None
        buffer = ctypes.create_string_buffer(size.value)
        if getattr(self._library, f"nvrtcGet{what}")(program, buffer) != _SUCCESS:
            return None
        return buffer.raw

    def _lowered(self, program: ctypes.c_void_p, name: bytes) -> str:
        lowered = ctypes.c_char_p()
        code = self._library.nvrtcGetLoweredName(program, name, ctypes.byref(lowered))
        self._check(code, f"find the lowered name of {name.decode()!r}")
        return (lowered.value or b"").decode()

    def _check(self, code: int, doing: str) -> None:
        if code != _SUCCESS:
            raise self._rejected(code, doing)

    def _rejected(self, code: int, doing: str, done: Artifact = Artifact()) -> _RejectedError:  # noqa: B008  immutable
        text = self._library.nvrtcGetErrorString(code).decode(errors="replace")
        return _RejectedError(Reply(Status.REJECTED, done, code=code, doing=doing, text=text))


def _load_builtins(path: str) -> None:
    """Load the builtins library from the directory of the NVRTC library at `path`.

    Otherwise NVRTC itself would load it, by its file name alone. This fails in releases without a
    search path for it, such as 13.0.88.
    """
    folder = os.path.dirname(os.path.realpath(path))
    with suppress(OSError):
        for name in sorted(os.listdir(folder)):
            if name.startswith("libnvrtc-builtins.so"):
                ctypes.CDLL(os.path.join(folder, name))


def _strings(texts: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    raw = (text.encode("utf-8", "surrogateescape") for text in texts)
    return (ctypes.c_char_p * len(texts))(*raw)
