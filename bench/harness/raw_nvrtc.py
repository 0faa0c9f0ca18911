"""Raw NVRTC: compiles a corpus case by `cuda.bindings.nvrtc` alone, and measures the time.

This is the floor that a cache miss is measured against.
"""

import time
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

from harness.corpus import Case


class RawCompileError(RuntimeError):
    """NVRTC refused the source; the text is its log."""


@dataclass(frozen=True, slots=True)
class RawCompile:
    """What one compile gave.

    `seconds` runs from the creation of the program to its destruction, with every output copied
    out; loading the library is not in it. `cubin` is None for a virtual architecture.
    """

    seconds: float
    ptx: bytes
    cubin: bytes | None
    log: str
    lowered_names: dict[str, str]


def compile_case(case: Case, arch: str | None = None) -> RawCompile:
    """Compiles `case` for `arch`, its default one if None; raises RawCompileError.

    Threads may compile at the same time.
    """
    target = arch or case.arch
    options = nvrtc_options(case, target)
    start = time.perf_counter()
    ptx, cubin, log, lowered = _compile(case, options, with_cubin=target.startswith("sm_"))
    return RawCompile(time.perf_counter() - start, ptx, cubin, log, lowered)


def nvrtc_options(case: Case, arch: str) -> list[str]:
    """Returns the compiler options of `case`, NVRTC's own cache switched off where it has one."""
    options = [f"--gpu-architecture={arch}", f"--std={case.std}", *case.extra_options]
    options += [f"--include-path={directory}" for directory in case.include_dirs]
    if nvrtc_version() >= (12, 9):
        options.append("--no-cache")
    return options


@cache
def nvrtc_version() -> tuple[int, int]:
    """Returns the version of the NVRTC library, loading it the first time."""
    nvrtc = _bindings()
    _, major, minor = nvrtc.nvrtcVersion()
    return int(major), int(minor)


def _bindings() -> ModuleType:
    try:
        return import_module("cuda.bindings.nvrtc")
    except ModuleNotFoundError as error:
        raise RuntimeError(
            'cuda.bindings is not installed; install the extra "cu13" or "cu12"'
        ) from error


def _compile(
    case: Case, options: list[str], *, with_cubin: bool
) -> tuple[bytes, bytes | None, str, dict[str, str]]:
    nvrtc = _bindings()
    status, program = nvrtc.nvrtcCreateProgram(
        case.source.encode(), f"{case.name}.cu".encode(), 0, [], []
    )
    _check(nvrtc, status)
    try:
        for name in case.names:
            _check(nvrtc, *nvrtc.nvrtcAddNameExpression(program, name.encode()))
        (status,) = nvrtc.nvrtcCompileProgram(
            program, len(options), [option.encode() for option in options]
        )
        log = _output(nvrtc, program, "ProgramLog").rstrip(b"\0\n ").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RawCompileError(f"{case.name}: {status.name}\n{log}")
        ptx = _output(nvrtc, program, "PTX")
        cubin = _output(nvrtc, program, "CUBIN") if with_cubin else None
        # Lowered names last as long as the program does.
        lowered = {name: _lowered(nvrtc, program, name) for name in case.names}
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return ptx, cubin, log, lowered


def _output(nvrtc: ModuleType, program: object, kind: str) -> bytes:
    """Copies one output. The library fills the buffer in place: `bytes` must not be given to it.

    A `b" " * n` buffer, as often seen, is the interpreter's own b" " for n = 1, the size of an
    empty log, and the write changes that constant for the whole process.
    """
    status, size = getattr(nvrtc, f"nvrtcGet{kind}Size")(program)
    _check(nvrtc, status)
    buffer = bytearray(size)
    _check(nvrtc, *getattr(nvrtc, f"nvrtcGet{kind}")(program, buffer))
    return bytes(buffer)


def _lowered(nvrtc: ModuleType, program: object, name: str) -> str:
    status, lowered = nvrtc.nvrtcGetLoweredName(program, name.encode())
    _check(nvrtc, status)
    return str(lowered.decode())


def _check(nvrtc: ModuleType, status: object) -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC: {status}")
