"""Programs: texts of programs that get one kernel, and functions that run them."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from corpus import ARCH, STD, Case

#: A program that uses kcache. It prints how often it compiled: once or never.
_KCACHE = """\
import kcache
cache = kcache.KernelCache({directory!r}, backend={backend!r})
options = kcache.CompileOptions(**{settings!r})
cache.get_or_compile({source!r}, {names!r}, options)
print(cache.stats().compiles)
"""
#: A program that compiles with the bindings of NVRTC, as CuPy and cuda.core do.
_NVRTC = """\
from cuda.bindings import nvrtc
_, program = nvrtc.nvrtcCreateProgram({source!r}.encode(), b"kernel.cu", 0, [], [])
for name in {names!r}:
    nvrtc.nvrtcAddNameExpression(program, name.encode())
flags = [flag.encode() for flag in {flags!r}]
(status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
    raise SystemExit(str(status))
for kind in ("PTX", "CUBIN", "ProgramLog"):
    _, size = getattr(nvrtc, f"nvrtcGet{{kind}}Size")(program)
    getattr(nvrtc, f"nvrtcGet{{kind}}")(program, bytearray(size))
for name in {names!r}:
    nvrtc.nvrtcGetLoweredName(program, name.encode())
nvrtc.nvrtcDestroyProgram(program)
"""
#: A program that does the same as cuda.core's `Program.compile(cache=...)`. That method itself
#: rejects name expressions, and it rejects include paths unless the caller passes a digest of all
#: headers. This program passes a constant as the digest, so it verifies no header.
_CUDA_CORE = """\
source = {source!r}
from cuda.core import ObjectCode, Program, ProgramOptions
from cuda.core.utils import FileStreamProgramCache, make_program_cache_key
options = ProgramOptions(arch={arch!r}, std={std!r}, include_path={paths!r} or None)
for flag in {more!r}:
    setattr(options, flag.lstrip("-").replace("-", "_"), True)
cache = FileStreamProgramCache({directory!r})
key = make_program_cache_key(
    code=source, code_type="c++", options=options, target_type="cubin",
    name_expressions={names!r}, extra_digest=b"headers" if {paths!r} else None,
)
found = cache.get(key)
if found is None:
    cache[key] = code = Program(source, "c++", options).compile("cubin", {names!r})
else:
    code = ObjectCode.from_cubin(found)
if not code.code:
    raise SystemExit("no code")
print(int(found is None))
"""
#: A program that gets a kernel as CuPy does. There may be no device, so the device's architecture
#: and the loading of the module are faked.
_CUPY = """\
import os
os.environ["CUPY_CACHE_DIR"] = {directory!r}
from types import SimpleNamespace
from cupy.cuda import compiler
class Module:
    def load(self, cubin): pass
    def _set_mapping(self, mapping): pass
compiler.function = SimpleNamespace(Module=Module)
compiler._get_arch_for_options_for_nvrtc = lambda _arch=None: ("-arch={arch}", "cubin")
options = tuple("-I" + path for path in {paths!r})
compiler._compile_module_with_cache({source!r}, options, arch={arch!r}[3:])
"""
CODE = {
    "kcache": _KCACHE,
    "NVRTC": _NVRTC,
    "cuda.core": _CUDA_CORE,
    "CuPy": _CUPY,
    "nothing": "pass",
}


def program(kind: str, case: Case, directory: Path | str, *, backend: str = "file") -> str:
    """Return the text of a program that gets the kernel `case`; `kind` is a key of `CODE`."""
    return CODE[kind].format(
        directory=str(directory),
        backend=backend,
        source=case.source,
        names=case.names,
        settings=case.settings,
        flags=case.flags,
        paths=[str(path) for path in case.include_paths],
        more=list(case.more),
        arch=ARCH,
        std=STD,
    )


def run(code: str, *launcher: str, where: Path | None = None) -> str:
    """Run a program, if given under a launcher such as `kcache run`; return its output."""
    command = [*launcher, sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=where, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(launcher)} python: {done.stderr[-2000:]}")
    return done.stdout


def run_at_once(codes: Sequence[str]) -> list[str]:
    """Run programs at the same time; return the output of each after all have ended."""
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdin=null, stdout=pipe, text=True)
        for code in codes
    ]
    printed = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError("a program failed")
    return printed
