"""The compiler: one NVRTC compile, from source text to PTX, CUBIN or LTOIR.

A process that is forked while another thread is in here can't use NVRTC: there, whatever is asked
of the compiler is asked `elsewhere`.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kcache.errors import CompileError, CompileOptionError, CompilerNotFoundError

__all__ = [
    "Compiled",
    "Precompiled",
    "compile_program",
    "precompile",
    "precompiled_heap",
    "set_precompiled_heap",
    "supported_archs",
    "version",
]


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one compile returned.

    Attributes:
        ptx, cubin, ltoir: the outputs; None where the target has none of that kind.
        lowered_names: name expression -> mangled name.
        log: the compiler's log, warnings included.
        seconds: wall time of the compile.
        raw_log: the log as NVRTC returned it, or None where it is empty or not known.
    """

    ptx: bytes | None
    cubin: bytes | None
    ltoir: bytes | None
    lowered_names: Mapping[str, str]
    log: str
    seconds: float
    raw_log: bytes | None = None


@dataclass(frozen=True, slots=True)
class Precompiled:
    """What a compile that makes a precompiled header returned.

    Attributes:
        log: the compiler's log.
        heap: bytes that the header takes in the heap of `precompiled_heap`.
        exhausted: whether that heap is too small for it, so that no file was made.
    """

    log: str
    heap: int
    exhausted: bool


#: A token of each use of NVRTC under way in this process, its loading included.
_uses: set[object] = set()
#: Whether this process was forked during one, which left NVRTC's locks held by nobody.
_forked_inside = False


@contextmanager
def _inside() -> Generator[None, None, None]:
    """Marks a use of NVRTC. No lock, which a fork could copy: a set's methods are atomic."""
    use = object()
    _uses.add(use)
    try:
        yield
    finally:
        _uses.discard(use)


def _after_fork_in_child() -> None:
    global _forked_inside  # noqa: PLW0603
    _forked_inside = _forked_inside or bool(_uses)
    _uses.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


@functools.cache
def _nvrtc() -> Any:  # noqa: ANN401  compiled, and ships no types
    """Return the bindings, with the library loaded.

    Raises:
        CompilerNotFoundError: one of the two is missing.
    """
    hint = "install kcache-cuda[cu13] (CUDA 13) or kcache-cuda[cu12] (CUDA 12)"
    with _inside():
        try:
            nvrtc: Any = import_module("cuda.bindings.nvrtc")
        except ImportError as error:
            raise CompilerNotFoundError(
                f"cuda-python's NVRTC bindings are missing: {hint}"
            ) from error
        try:
            nvrtc.nvrtcVersion()
        except Exception as error:  # pathfinder's own exceptions, RuntimeError, OSError: by version
            raise CompilerNotFoundError(
                f"the NVRTC library can't be loaded ({error}): {hint}"
            ) from error
        return nvrtc


@functools.cache
def version() -> tuple[int, int]:
    """Return NVRTC's (major, minor) version; loads the library.

    Raises:
        CompilerNotFoundError: NVRTC or its bindings are not installed.
    """
    if _forked_inside:
        from kcache.nvrtc import elsewhere

        return elsewhere.version()
    _, major, minor = _nvrtc().nvrtcVersion()
    return int(major), int(minor)


def supported_archs() -> tuple[int, ...]:
    """Return the architecture numbers that the library knows, ascending; loads the library.

    Raises:
        CompilerNotFoundError: NVRTC or its bindings are not installed.
    """
    if _forked_inside:
        from kcache.nvrtc import elsewhere

        return elsewhere.supported_archs()
    _, archs = _nvrtc().nvrtcGetSupportedArchs()
    return tuple(int(arch) for arch in archs)


def compile_program(
    source: str,
    flags: Sequence[str],
    *,
    names: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    source_name: str,
) -> Compiled:
    """Compile `source` once and return every output that the flags ask for.

    Needs no driver and no GPU. Threads: releases the GIL while it compiles. Fork: a child that was
    forked during another thread's compile has its own done by a new process.

    Raises:
        CompilerNotFoundError: NVRTC or its bindings are not installed, or such a child can't have
            a new process.
        CompileOptionError: the compiler refused an option or the architecture.
        CompileError: the compiler refused the source; `.log` has its whole log.
    """
    if _forked_inside:
        from kcache.nvrtc import elsewhere

        return elsewhere.compile_program(
            source, flags, names=names, headers=headers or {}, source_name=source_name
        )
    nvrtc = _nvrtc()
    with _inside(), _program(nvrtc, source, headers or {}, source_name) as program:
        for name in names:
            (error,) = nvrtc.nvrtcAddNameExpression(program, name.encode())
            _check(nvrtc, error, f"add the name expression {name!r}", source_name)
        log, seconds, raw_log = _compile(nvrtc, program, flags, source_name)
        lowered = {name: _lowered(nvrtc, program, name, source_name) for name in names}
        ptx = _read(nvrtc, program, "PTX")
        return Compiled(
            ptx.rstrip(b"\0") if ptx is not None and len(ptx) > 1 else None,
            _read(nvrtc, program, "CUBIN"),
            _read(nvrtc, program, "LTOIR"),
            lowered,
            log,
            seconds,
            raw_log if log else None,
        )


def precompile(
    source: str,
    flags: Sequence[str],
    path: str,
    *,
    headers: Mapping[str, str],
    source_name: str,
) -> Precompiled:
    """Compile `source`, and write the state that the compiler is in at its end to a new file.

    There may be no file afterwards though all is well: the heap is exhausted, or the source is one
    that can't be precompiled. NVRTC 12.8 and later.

    Raises:
        CompileError: the compiler refused the source, or could not write the file; or this process
            can have no precompiled headers.
    """
    nvrtc = _nvrtc_with_precompiled()
    with _inside(), _program(nvrtc, source, headers, source_name) as program:
        log, _, _ = _compile(nvrtc, program, (*flags, f"--create-pch={path}"), source_name)
        (status,) = nvrtc.nvrtcGetPCHCreateStatus(program)
        _, heap = nvrtc.nvrtcGetPCHHeapSizeRequired(program)
        exhausted = status == nvrtc.nvrtcResult.NVRTC_ERROR_PCH_CREATE_HEAP_EXHAUSTED
        return Precompiled(log, int(heap), exhausted)


def precompiled_heap() -> int:
    """Return the size in bytes of the heap that precompiled headers live in, one per process.

    Raises:
        CompileError: this process can have none.
    """
    _, size = _nvrtc_with_precompiled().nvrtcGetPCHHeapSize()
    return int(size)


def set_precompiled_heap(size: int) -> None:
    """Set that size. The heap moves, and no precompiled header made before can be used again."""
    _nvrtc_with_precompiled().nvrtcSetPCHHeapSize(size)


def _nvrtc_with_precompiled() -> Any:  # noqa: ANN401  untyped module
    """Return the bindings, unless this process has to compile elsewhere.

    A precompiled header is of use to the process alone that made it.
    """
    if _forked_inside:
        raise CompileError("this process was forked while another thread compiled")
    return _nvrtc()


@contextmanager
def _program(
    nvrtc: Any,  # noqa: ANN401
    source: str,
    headers: Mapping[str, str],
    source_name: str,
) -> Generator[object, None, None]:
    error, program = nvrtc.nvrtcCreateProgram(
        source.encode(),
        source_name.encode(),
        len(headers),
        [text.encode() for text in headers.values()],
        [name.encode() for name in headers],
    )
    _check(nvrtc, error, "create a program", source_name)
    try:
        yield program
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _compile(
    nvrtc: Any,  # noqa: ANN401
    program: object,
    flags: Sequence[str],
    source_name: str,
) -> tuple[str, float, bytes]:
    """Compile a program; return (log, seconds, log as it is)."""
    encoded = [flag.encode("utf-8", "surrogateescape") for flag in flags]  # paths are bytes
    started = time.perf_counter()
    (error,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    seconds = time.perf_counter() - started
    log = _read(nvrtc, program, "ProgramLog") or b""
    # NVRTC ends each tool's part with a NUL.
    text = log.decode(errors="replace").replace("\0", "").strip(" \n")
    if int(error) != 0:
        raise _failure(nvrtc, error, text, source_name, flags, raw_log=log)
    return text, seconds, log


def _read(nvrtc: Any, program: object, what: str) -> bytes | None:  # noqa: ANN401  untyped module
    """Return one of the program's outputs, or None where it has none."""
    error, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    if int(error) != 0 or not size:
        return None
    # Not bytes: NVRTC writes into the buffer, and Python shares bytes objects of length 1.
    buffer = bytearray(size)
    (error,) = getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return bytes(buffer) if int(error) == 0 else None


def _lowered(nvrtc: Any, program: object, name: str, source_name: str) -> str:  # noqa: ANN401
    error, lowered = nvrtc.nvrtcGetLoweredName(program, name.encode())
    _check(nvrtc, error, f"find the name expression {name!r}", source_name)
    return str(lowered.decode())


def _check(nvrtc: Any, error: Any, doing: str, source_name: str) -> None:  # noqa: ANN401
    if int(error) != 0:
        reason = _describe(nvrtc, error)
        raise CompileError(f"{source_name}: could not {doing}: {reason}", source_name=source_name)


def _describe(nvrtc: Any, error: Any) -> str:  # noqa: ANN401
    _, text = nvrtc.nvrtcGetErrorString(error)
    return str(text.decode())


def _failure(
    nvrtc: Any,  # noqa: ANN401
    error: Any,  # noqa: ANN401
    log: str,
    source_name: str,
    flags: Sequence[str],
    *,
    raw_log: bytes,
) -> CompileError:
    first = next((line for line in log.splitlines() if "error" in line), log.partition("\n")[0])
    message = f"{source_name}: {first or _describe(nvrtc, error)}"
    result = nvrtc.nvrtcResult
    unknown_arch = "gpu-architecture" in log or "--nv_arch" in log
    if unknown_arch or error in (
        result.NVRTC_ERROR_INVALID_OPTION,
        result.NVRTC_ERROR_INVALID_INPUT,
    ):
        arch = next((f.partition("=")[2] for f in flags if f.startswith("--gpu-arch")), None)
        if unknown_arch and arch is not None:
            known = ", ".join(map(str, supported_archs()))
            message = f"arch={arch!r} is not known to this NVRTC; allowed: sm_ or compute_ {known}"
        kind: type[CompileError] = CompileOptionError
    else:
        kind = CompileError
    return kind(message, log=log, source_name=source_name, result=int(error), raw_log=raw_log)
