"""Raw NVRTC: compiles a corpus case by `cuda.bindings.nvrtc` alone, and measures the time.

This is the floor that a cache miss is measured against. From the command line:

    python bench/harness/raw_nvrtc.py cub_reduce --arch sm_90 --repeat 3 --trace
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from statistics import median
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[1]))  # it is also run by its path

from harness.corpus import NAMES, Case, load


class RawCompileError(RuntimeError):
    """NVRTC refused the source; the text is its log."""


@dataclass(frozen=True, slots=True)
class RawCompile:
    """What one compile gave.

    `seconds` runs from the creation of the program to its destruction, with every output copied
    out; loading the library is not in it. `cubin` is None for a virtual architecture, `trace` is
    None where none was asked for, and otherwise the text of the compiler's Chrome trace.
    """

    seconds: float
    ptx: bytes
    cubin: bytes | None
    log: str
    lowered_names: dict[str, str]
    trace: bytes | None = None


def compile_case(
    case: Case,
    arch: str | None = None,
    *,
    extra_options: Sequence[str] = (),
    trace: bool = False,
) -> RawCompile:
    """Compiles `case` for `arch`, its default one if None; raises RawCompileError.

    With `trace`, the compiler also writes its time trace; RuntimeError says where it cannot.
    Threads may compile at the same time.

    A source whose every external definition is a template gives other bytes in every compile: the
    names of its internal symbols hold a random number and the process id. `fixed_names` makes them
    reproducible.
    """
    target = arch or case.arch
    with _trace_file() if trace else nullcontext() as sink:
        options = [*nvrtc_options(case, target), *extra_options]
        if sink is not None:
            options.append(f"--fdevice-time-trace={sink.base}")
        start = time.perf_counter()
        ptx, cubin, log, lowered = _compile(case, options, with_cubin=target.startswith("sm_"))
        seconds = time.perf_counter() - start
        events = sink.read() if sink is not None else None
    return RawCompile(seconds, ptx, cubin, log, lowered, events)


def nvrtc_options(case: Case, arch: str) -> list[str]:
    """Returns the compiler options of `case`, NVRTC's own cache switched off where it has one."""
    options = [f"--gpu-architecture={arch}", f"--std={case.std}", *case.extra_options]
    options += [f"--include-path={directory}" for directory in case.include_dirs]
    if nvrtc_version() >= (12, 9):
        options.append("--no-cache")
    return options


def fixed_names(case: Case) -> list[str]:
    """Returns the option that makes the bytes of `case` reproducible, if NVRTC has it."""
    return [f"--frandom-seed={case.name}"] if nvrtc_version() >= (12, 9) else []


@cache
def nvrtc_version() -> tuple[int, int]:
    """Returns the version of the NVRTC library, loading it the first time."""
    nvrtc = _bindings()
    _, major, minor = nvrtc.nvrtcVersion()
    return int(major), int(minor)


def headers_read(trace: bytes) -> list[str]:
    """Returns the headers that a traced compile opened, each once, in the order of the trace."""
    events = json.loads(trace)["traceEvents"]
    # The last event is an empty object, without a name (NVRTC 13.5).
    opened = (event for event in events if event.get("name") == "Processing Header File")
    paths = (event["args"]["detail"] for event in opened)
    return list(dict.fromkeys(paths))


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


@dataclass(frozen=True, slots=True)
class _TraceFile:
    """A trace in memory: the compiler opens `base`.json, and `read` gives what it wrote."""

    base: Path
    descriptor: int

    def read(self) -> bytes:
        return os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)


@contextmanager
def _trace_file() -> Iterator[_TraceFile]:
    """A place for one trace: a symbolic link to a file in memory.

    The compiler aborts the whole process when it cannot open or fill the trace file, so that file
    is never on a disk, which may be full.
    """
    if not hasattr(os, "memfd_create"):
        raise RuntimeError("a trace needs os.memfd_create, which this platform does not have")
    if nvrtc_version() < (13, 0):
        raise RuntimeError("a trace needs NVRTC 13.0 or later: earlier ones list no headers")
    descriptor = os.memfd_create("nvrtc-trace")
    try:
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder) / "trace"
            base.with_suffix(".json").symlink_to(f"/proc/self/fd/{descriptor}")
            yield _TraceFile(base, descriptor)
    finally:
        os.close(descriptor)


def _report(case: Case, arch: str, repeat: int, trace: bool) -> str:
    """Compiles alternately without and with the trace, so that both see the same machine."""
    compile_case(_WARM_UP)
    seed = fixed_names(case)
    plain: list[RawCompile] = []
    traced: list[RawCompile] = []
    for _ in range(repeat):
        plain.append(compile_case(case, arch, extra_options=seed))
        if trace:
            traced.append(compile_case(case, arch, extra_options=seed, trace=True))
    bare = median(run.seconds for run in plain)
    last = plain[-1]
    lines = [
        f"{case.name} for {arch}: NVRTC {'.'.join(map(str, nvrtc_version()))}, median of {repeat}",
        f"  compile   {bare * 1e3:10.1f} ms",
        f"  PTX       {len(last.ptx):10,} bytes",
        f"  CUBIN     {len(last.cubin or b''):10,} bytes",
        f"  log       {len(last.log):10,} characters",
    ]
    lines += [f"  {name}  ->  {lowered}" for name, lowered in last.lowered_names.items()]
    if traced:
        lines += _trace_lines(bare, last, traced)
    return "\n".join(lines)


def _trace_lines(bare: float, plain: RawCompile, traced: list[RawCompile]) -> list[str]:
    seconds = median(run.seconds for run in traced)
    events = traced[-1].trace or b""
    same = all((run.ptx, run.cubin) == (plain.ptx, plain.cubin) for run in traced)
    return [
        f"  traced    {seconds * 1e3:10.1f} ms, {seconds / bare:.3f} times the bare compile",
        f"  trace     {len(events):10,} bytes, {len(headers_read(events))} headers",
        f"  code      {'identical' if same else 'DIFFERENT'} with and without the trace",
    ]


# The first compile of a process also loads the compiler's built-in library.
_WARM_UP = Case("warm_up", 'extern "C" __global__ void warm_up() {}\n', ("warm_up",))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a bare NVRTC compile of a corpus case.")
    parser.add_argument("case", choices=NAMES)
    parser.add_argument("--arch", help="such as sm_90 or compute_90; default: the case's")
    parser.add_argument("--repeat", type=int, default=3, help="compiles to take the median of")
    parser.add_argument("--trace", action="store_true", help="time it with the header trace too")
    arguments = parser.parse_args()
    if arguments.repeat < 1:
        parser.error("--repeat is at least 1")
    try:
        case = load(arguments.case)
        print(_report(case, arguments.arch or case.arch, arguments.repeat, arguments.trace))
    except RuntimeError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
