"""Reference: compile with NVRTC without kcache, for comparison with what kcache returns."""

import functools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import kcache
from kcache import CompileOptions
from kcache.nvrtc.options import are_harmless, parse_options

ARCH = CompileOptions(arch="sm_80")
#: Options without machine code, which would take half of the time. They are for tests that only
#: check what a kernel depends on.
PTX = CompileOptions(arch="compute_80")

#: A kernel whose machine code shows the value of the macro V.
KERNEL = 'extern "C" __global__ void k(int* out) { *out = V; }\n'

#: A kernel for which NVRTC makes different code if it has compiled with `-G` before.
REL = """
struct S { float v[40]; };
__device__ float h(S s, int i) { return s.v[i] + s.v[i + 1]; }
extern "C" __global__ void rel(S s, float* o, int n)
{
    float a = 0;
    for (int i = 0; i < 8; i++) a += h(s, i);
    o[threadIdx.x] = a + s.v[n];
}
"""


class Fresh(NamedTuple):
    """The result of a compile without kcache. If the compile failed, only the log is set."""

    ptx: bytes | None
    cubin: bytes | None
    ltoir: bytes | None
    lowered_names: dict[str, str]
    log: str
    failed: bool


def _read(nvrtc: Any, program: Any, what: str) -> bytes | None:
    error, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    if int(error) or size <= (1 if what == "PTX" else 0):
        return None
    buffer = bytearray(size)
    (error,) = getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    assert int(error) == 0
    return bytes(buffer).rstrip(b"\0") if what == "PTX" else bytes(buffer)


def compile_fresh(
    source: str,
    flags: Sequence[str],
    *,
    names: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    source_name: str = "kernel.cu",
) -> Fresh:
    """Compile with `cuda.bindings.nvrtc` alone; the result is that of a new process.

    If all options are known to have no effect on later compiles, this process compiles, else a new
    process does. An equal compile that reads no files is not repeated.
    """
    if not are_harmless(parse_options(flags)):
        return compile_clean(source, flags, names=names, headers=headers, source_name=source_name)
    if not _is_alone(source, flags, headers):
        return _compile(source, flags, names, headers or {}, source_name)
    variables = (item for item in os.environ.items() if item[0].startswith(("CUDA", "NV")))
    surroundings = (_here(), *variables)
    return _compile_once(source, tuple(flags), tuple(names), source_name, surroundings)


def _is_alone(source: str, flags: Sequence[str], headers: Mapping[str, str] | None) -> bool:
    """Return whether a compile depends only on its arguments, not on files or macros of NVRTC."""
    told = any(name in flag for flag in flags for name in ("include", "-I", "__"))
    return not (headers or told or re.search(r"#|%:|\?\?|\\\n|__[A-Z]|_Pragma", source))


@functools.lru_cache(maxsize=256)
def _compile_once(
    source: str,
    flags: tuple[str, ...],
    names: tuple[str, ...],
    source_name: str,
    _surroundings: tuple[object, ...],
) -> Fresh:
    """Compile, or return the result of an equal compile that this process has done before."""
    return _compile(source, flags, names, {}, source_name)


def compile_clean(
    source: str,
    flags: Sequence[str],
    *,
    names: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    source_name: str = "kernel.cu",
    env: Mapping[str, str] | None = None,
) -> Fresh:
    """Compile with `cuda.bindings.nvrtc` alone, in a process that has compiled nothing before."""
    request = [source, list(flags), list(names), dict(headers or {}), source_name]
    asked = json.dumps([{**os.environ, **(env or {})}, _here(), request])
    with _ASKING:
        server = _server(os.getpid())
        server.stdin.write(f"{asked}\n")  # type: ignore[union-attr]
        server.stdin.flush()  # type: ignore[union-attr]
        told = server.stdout.readline()  # type: ignore[union-attr]
    assert told, "the compiler crashed"
    *outputs, lowered, log, failed = json.loads(told)
    ptx, cubin, ltoir = (None if each is None else bytes.fromhex(each) for each in outputs)
    return Fresh(ptx, cubin, ltoir, lowered, log, failed)


def _here() -> str:
    """Return the working directory, or an empty text if it no longer exists."""
    with suppress(FileNotFoundError):
        return os.getcwd()
    return ""


_ASKING = threading.Lock()


@functools.cache
def _server(_pid: int) -> subprocess.Popen[str]:
    """Return a process that forks a child for each compile. It ends when this process ends.

    The process has imported the bindings, so that its children need not import them, but it has not
    loaded NVRTC.
    """
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, os.path.abspath(__file__)]
    return subprocess.Popen(command, cwd="/", start_new_session=True, **pipes)


def _serve() -> None:
    """Answer the requests of `compile_clean`, each in a new child."""
    import cuda.bindings.nvrtc  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _answer(*json.loads(line))
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            break


def _answer(environment: dict[str, str], here: str, request: list[Any]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    if here:
        os.chdir(here)
    *outputs, lowered, log, failed = _compile(*request)
    coded = [None if each is None else each.hex() for each in outputs]  # type: ignore[union-attr]
    print(json.dumps([*coded, lowered, log, failed]), flush=True)


def _compile(
    source: str,
    flags: Sequence[str],
    names: Sequence[str],
    headers: Mapping[str, str],
    source_name: str,
) -> Fresh:
    from cuda.bindings import nvrtc

    error, program = nvrtc.nvrtcCreateProgram(
        source.encode(),
        os.fsencode(source_name),
        len(headers),
        [text.encode() for text in headers.values()],
        [name.encode() for name in headers],
    )
    assert int(error) == 0
    for name in names:
        nvrtc.nvrtcAddNameExpression(program, name.encode())
    encoded = [os.fsencode(flag) for flag in flags]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    log = (_read(nvrtc, program, "ProgramLog") or b"").decode(errors="replace").strip("\0 \n")
    if int(error):
        nvrtc.nvrtcDestroyProgram(program)
        return Fresh(None, None, None, {}, log, failed=True)
    lowered = {n: nvrtc.nvrtcGetLoweredName(program, n.encode())[1].decode() for n in names}
    outputs = (_read(nvrtc, program, what) for what in ("PTX", "CUBIN", "LTOIR"))
    fresh = Fresh(*outputs, lowered, log, failed=False)
    nvrtc.nvrtcDestroyProgram(program)
    return fresh


def agree(
    cache: kcache.KernelCache,
    source: str,
    options: CompileOptions = ARCH,
    names: Sequence[str] = (),
    *,
    headers: Mapping[str, str] | None = None,
    source_name: str = "kernel.cu",
    extra_key: bytes = b"",
) -> kcache.CompiledKernel | None:
    """Return the cache's kernel, and assert that a fresh compile gives the same outputs.

    Returns None if the source compiles neither with the cache nor without it.
    """
    expected = compile_fresh(
        source, options.flags(), names=names, headers=headers, source_name=source_name
    )
    refused: kcache.CompileError | None = None
    try:
        kernel = cache.get_or_compile(
            source, names, options, headers=headers, source_name=source_name, extra_key=extra_key
        )
    except kcache.CompileError as error:
        refused = error
    if refused is not None:
        assert expected.failed, f"a fresh compile works, but not the cache: {refused}"
        return None
    assert not expected.failed, f"stale: a fresh compile fails: {expected.log}"
    assert kernel.ptx == expected.ptx, f"stale PTX (cached={kernel.cached})"
    assert kernel.cubin == expected.cubin, f"stale CUBIN (cached={kernel.cached})"
    assert kernel.ltoir == expected.ltoir
    assert dict(kernel.lowered_names) == expected.lowered_names
    return kernel


def agreed(*args: Any, **kwargs: Any) -> kcache.CompiledKernel:
    """Do the same as `agree`, and assert that the source compiles."""
    kernel = agree(*args, **kwargs)
    assert kernel is not None
    return kernel


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def next_tick() -> None:
    """Wait until the clock of file times has ticked, so that the next write gets another time."""
    before = time.clock_gettime_ns(5)
    while time.clock_gettime_ns(5) == before:
        pass


if __name__ == "__main__":
    _serve()
