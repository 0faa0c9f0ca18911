"""Nvrtc: the compiler's C interface, by ctypes: load one library, compile one program at a time."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

__all__ = ["Nvrtc", "Outputs", "Refused"]

_SUCCESS = 0


class Outputs(NamedTuple):
    """The outputs of one compile; None if the target has no output of that kind.

    Attributes:
        ptx, cubin, ltoir: the outputs.
        lowered_names: mangled names, in the order of the name expressions.
        log: the compiler's log.
        seconds: wall time of the compile.
    """

    ptx: bytes | None
    cubin: bytes | None
    ltoir: bytes | None
    lowered_names: tuple[bytes, ...]
    log: bytes
    seconds: float


class Refused(Exception):  # noqa: N818  the compiler's answer, no failure of ours
    """The compiler refused a request.

    Attributes:
        code: NVRTC's result code.
        doing: the refused operation, in words; empty for a compile.
        text: NVRTC's name of the code.
        log: the compiler's log.
        seconds: wall time of the compile.
    """

    def __init__(self, code: int, doing: str, text: str, log: bytes, seconds: float) -> None:
        super().__init__(text)
        self.code = code
        self.doing = doing
        self.text = text
        self.log = log
        self.seconds = seconds


class Nvrtc:
    """One loaded NVRTC library.

    Only one thread may use it at a time. It releases the GIL while it compiles.

    Args:
        path: of the library.

    Raises:
        OSError: it can't be loaded.
    """

    def __init__(self, path: str) -> None:
        _load_builtins(path)
        self._library = library = ctypes.CDLL(path)
        library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self) -> tuple[int, int]:
        """Return (major, minor)."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def supported_archs(self) -> tuple[int, ...]:
        """Return the architecture numbers that the library knows, ascending."""
        count = ctypes.c_int()
        self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._library.nvrtcGetSupportedArchs(archs)
        return tuple(archs)

    def compile(
        self,
        source: bytes,
        name: bytes,
        flags: Sequence[bytes],
        *,
        names: Sequence[bytes] = (),
        headers: Mapping[bytes, bytes],
    ) -> Outputs:
        """Compile a program and return every output that the flags ask for.

        Raises:
            Refused: the compiler refused something.
        """
        with self._program(source, name, headers) as program:
            for each in names:
                code = self._library.nvrtcAddNameExpression(program, each)
                self._check(code, f"add the name expression {each.decode()!r}")
            log, seconds = self._compile(program, flags)
            lowered = tuple(self._lowered(program, each) for each in names)
            ptx = self._output(program, "PTX")
            return Outputs(
                ptx.rstrip(b"\0") if ptx is not None and len(ptx) > 1 else None,
                self._output(program, "CUBIN"),
                self._output(program, "LTOIR"),
                lowered,
                log,
                seconds,
            )

    @contextmanager
    def _program(
        self, source: bytes, name: bytes, headers: Mapping[bytes, bytes]
    ) -> Generator[ctypes.c_void_p]:
        program = ctypes.c_void_p()
        texts = _strings(list(headers.values()))
        code = self._library.nvrtcCreateProgram(
            ctypes.byref(program), source, name, len(headers), texts, _strings(list(headers))
        )
        self._check(code, "create a program")
        try:
            yield program
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _compile(self, program: ctypes.c_void_p, flags: Sequence[bytes]) -> tuple[bytes, float]:
        started = time.perf_counter()
        code = self._library.nvrtcCompileProgram(program, len(flags), _strings(flags))
        seconds = time.perf_counter() - started
        log = self._output(program, "ProgramLog") or b""
        if code != _SUCCESS:
            raise Refused(code, "", self._describe(code), log, seconds)
        return log, seconds

    def _output(self, program: ctypes.c_void_p, what: str) -> bytes | None:
        size = ctypes.c_size_t()
        get_size = getattr(self._library, f"nvrtcGet{what}Size", None)
        if get_size is None or get_size(program, ctypes.byref(size)) != _SUCCESS or not size.value:
            return None
        buffer = ctypes.create_string_buffer(size.value)
        if getattr(self._library, f"nvrtcGet{what}")(program, buffer) != _SUCCESS:
            return None
        return buffer.raw

    def _lowered(self, program: ctypes.c_void_p, name: bytes) -> bytes:
        lowered = ctypes.c_char_p()
        code = self._library.nvrtcGetLoweredName(program, name, ctypes.byref(lowered))
        self._check(code, f"find the name expression {name.decode()!r}")
        return lowered.value or b""

    def _check(self, code: int, doing: str) -> None:
        if code != _SUCCESS:
            raise Refused(code, doing, self._describe(code), b"", 0.0)

    def _describe(self, code: int) -> str:
        text: bytes = self._library.nvrtcGetErrorString(code)
        return text.decode(errors="replace")


def _load_builtins(path: str) -> None:
    """Load the library of builtins beside a compiler.

    The compiler loads it by its name, and not every release has a path to it (13.0.88 has none).
    """
    folder = os.path.dirname(os.path.realpath(path))
    with suppress(OSError):
        for name in sorted(os.listdir(folder)):
            if name.startswith("libnvrtc-builtins.so"):
                ctypes.CDLL(os.path.join(folder, name))


def _strings(texts: Sequence[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*texts)
