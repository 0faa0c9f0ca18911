"""The compiler: one NVRTC compile, from source text to PTX, CUBIN or LTOIR."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kcache.errors import CompileError, CompileOptionError, CompilerNotFoundError

__all__ = ["Compiled", "compile_program", "supported_archs", "version"]


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one compile returned.

    Attributes:
        ptx, cubin, ltoir: the outputs; None where the target has none of that kind.
        lowered_names: name expression -> mangled name.
        log: the compiler's log, warnings included.
        seconds: wall time of the compile.
    """

    ptx: bytes | None
    cubin: bytes | None
    ltoir: bytes | None
    lowered_names: Mapping[str, str]
    log: str
    seconds: float


@functools.cache
def _nvrtc() -> Any:  # noqa: ANN401  compiled, and ships no types
    """Return the bindings, with the library loaded.

    Raises:
        CompilerNotFoundError: one of the two is missing.
    """
    hint = "install kcache-cuda[cu13] (CUDA 13) or kcache-cuda[cu12] (CUDA 12)"
    try:
        nvrtc: Any = import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise CompilerNotFoundError(f"cuda-python's NVRTC bindings are missing: {hint}") from error
    try:
        nvrtc.nvrtcVersion()
    except Exception as error:  # pathfinder's own exceptions, RuntimeError, OSError: by version
        raise CompilerNotFoundError(
            f"the NVRTC library can't be loaded ({error}): {hint}"
        ) from error
    return nvrtc


def version() -> tuple[int, int]:
    """Return NVRTC's (major, minor) version; loads the library.

    Raises:
        CompilerNotFoundError: NVRTC or its bindings are not installed.
    """
    _, major, minor = _nvrtc().nvrtcVersion()
    return int(major), int(minor)


def supported_archs() -> tuple[int, ...]:
    """Return the architecture numbers that the library knows, ascending; loads the library.

    Raises:
        CompilerNotFoundError: NVRTC or its bindings are not installed.
    """
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

    Needs no driver and no GPU. Threads: releases the GIL while it compiles.

    Raises:
        CompilerNotFoundError: NVRTC or its bindings are not installed.
        CompileOptionError: the compiler refused an option or the architecture.
        CompileError: the compiler refused the source; `.log` has its whole log.
    """
    nvrtc = _nvrtc()
    headers = headers or {}
    error, program = nvrtc.nvrtcCreateProgram(
        source.encode(),
        source_name.encode(),
        len(headers),
        [text.encode() for text in headers.values()],
        [name.encode() for name in headers],
    )
    _check(nvrtc, error, "create a program", source_name)
    try:
        for name in names:
            (error,) = nvrtc.nvrtcAddNameExpression(program, name.encode())
            _check(nvrtc, error, f"add the name expression {name!r}", source_name)
        encoded = [flag.encode("utf-8", "surrogateescape") for flag in flags]  # paths are bytes
        started = time.perf_counter()
        (error,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        seconds = time.perf_counter() - started
        log = _read(nvrtc, program, "ProgramLog") or b""
        # NVRTC ends each tool's part with a NUL.
        text = log.decode(errors="replace").replace("\0", "").strip(" \n")
        if int(error) != 0:
            raise _failure(nvrtc, error, text, source_name, flags)
        lowered = {name: _lowered(nvrtc, program, name, source_name) for name in names}
        ptx = _read(nvrtc, program, "PTX")
        return Compiled(
            ptx.rstrip(b"\0") if ptx is not None and len(ptx) > 1 else None,
            _read(nvrtc, program, "CUBIN"),
            _read(nvrtc, program, "LTOIR"),
            lowered,
            text,
            seconds,
        )
    finally:
        nvrtc.nvrtcDestroyProgram(program)


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
        return CompileOptionError(message, log=log, source_name=source_name)
    return CompileError(message, log=log, source_name=source_name)
