"""The chapter about the drop-in: what a hit costs through the socket, and what `kcache run` costs.

Run as a program, under `kcache run`, it measures hits from inside. Needs NVRTC, a C compiler and no
GPU.
"""

import ctypes as c
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.findings import Absent, Comparison, Fact, Timing
from harness.measure import Round, Rounds, Summary, interleave
from harness.plan import Found, Plan

from kcache.dropin import libraries
from kcache.nvrtc import library

PROGRAMS = 64
KCACHE = (sys.executable, "-m", "kcache", "run")
OUTPUTS = ("PTX", "CUBIN", "ProgramLog")
#: A kernel with some 100 KiB of machine code and as much PTX.
KERNELS = 8
BODY = "a[threadIdx.x] = " + " + ".join(f"sinf(a[{n}] * {n}.5f)" for n in range(4)) + ";"
SOURCE = "".join(
    f'extern "C" __global__ void k{n}(float* a) {{ {BODY} a[{n}] += {n}; }}\n'
    for n in range(KERNELS)
)
OPTIONS = (b"-arch=sm_90",)


class Interface:
    """NVRTC's interface by ctypes: the real library's or the drop-in's."""

    def __init__(self, path: str) -> None:
        self.library = c.CDLL(path)

    def compile(self, source: bytes) -> dict[str, bytes]:
        """Compile, and read every output, as a program does."""
        program = c.c_void_p()
        options = (c.c_char_p * len(OPTIONS))(*OPTIONS)
        nvrtc = self.library
        _check(nvrtc.nvrtcCreateProgram(c.byref(program), source, b"k.cu", 0, None, None))
        _check(nvrtc.nvrtcCompileProgram(program, len(options), options))
        outputs = {what: self._read(program, what) for what in OUTPUTS}
        _check(nvrtc.nvrtcDestroyProgram(c.byref(program)))
        return outputs

    def _read(self, program: c.c_void_p, what: str) -> bytes:
        size = c.c_size_t()
        _check(getattr(self.library, f"nvrtcGet{what}Size")(program, c.byref(size)))
        buffer = c.create_string_buffer(size.value)
        _check(getattr(self.library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw


def _check(result: int) -> None:
    if result != 0:
        raise RuntimeError(f"NVRTC returned {result}")


def _timed(task: Callable[[], object], times: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(times):
        task()
    return (time.perf_counter() - start) / times


# -- inside a program under `kcache run` -----------------------------------------------------------


def inside(path: str, directory: str, rounds: int) -> dict[str, list[float]]:
    """Measure hits; this process runs under `kcache run`."""
    import kcache

    interface = Interface(path)
    kept = SOURCE.encode()
    asked = kept + b"// not kept by the client: it might include something\n"
    options = kcache.CompileOptions(extra_options=[option.decode() for option in OPTIONS])
    for source in (kept, asked):
        for _ in range(3):
            outputs = interface.compile(source)
    with kcache.KernelCache(directory) as cache:

        def in_process() -> object:
            return cache.get_or_compile(asked.decode(), (), options, source_name="k.cu")

        in_process()
        taken = [
            {
                "socket": _timed(lambda: interface.compile(asked), 20),
                "repeated": _timed(lambda: interface.compile(kept), 50),
                "in process": _timed(in_process, 50),
            }
            for _ in range(rounds)
        ]
    sizes = [float(sum(map(len, outputs.values())))]
    return {**{name: [each[name] for each in taken] for name in taken[0]}, "bytes": sizes}


# -- outside ---------------------------------------------------------------------------------------


@contextmanager
def _folder() -> Iterator[dict[str, str]]:
    folder = tempfile.mkdtemp(prefix="kb-", dir="/tmp")
    try:
        yield {**os.environ, "KCACHE_DIR": f"{folder}/cache", "XDG_RUNTIME_DIR": folder}
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # an earlier server may still be ending


def _run(command: tuple[str, ...], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def hits(path: str, rounds: int) -> dict[str, list[float]]:
    """A hit: kept in the program, through the socket, and in process."""
    with _folder() as environment:
        folder = str(Path(__file__).parents[1])
        code = (
            f"import sys; sys.path.insert(0, {folder!r}); from chapters.dropin import main; main()"
        )
        directory = environment["KCACHE_DIR"]
        command = (sys.executable, "-c", code, path, directory, str(rounds))
        _run((*KCACHE, *command), environment)  # compiles
        found: dict[str, list[float]] = json.loads(_run((*KCACHE, *command), environment))
        return found


def starting(rounds: int) -> Rounds:
    """A program that compiles nothing, with and without `kcache run`."""
    script = shutil.which("kcache", path=os.path.dirname(sys.executable))
    launcher = (script, "run") if script else KCACHE
    program = (sys.executable, "-c", "pass")
    with _folder() as environment:
        _run((*launcher, *program), environment)
        return interleave(
            rounds,
            [
                lambda: {"bare": _timed(lambda: _run(program, environment))},
                lambda: {"run": _timed(lambda: _run((*launcher, *program), environment))},
            ],
        )


MISSES = """
import sys, time
sys.path.insert(0, sys.argv[1])
from chapters.dropin import Interface
interface = Interface(sys.argv[2])
source = b'extern "C" __global__ void k(float* a) { a[%d] = 1; }'
start = time.perf_counter()
interface.compile(source % int(sys.argv[3]))
first = time.perf_counter() - start
start = time.perf_counter()
for number in range(1, 21):
    interface.compile(source % (number + int(sys.argv[3])))
print(first, (time.perf_counter() - start) / 20)
"""


def misses(path: str, rounds: int) -> Rounds:
    """A miss of a trivial kernel, with and without `kcache run`; the first one apart.

    The first loads NVRTC; under `kcache run` it starts a worker, which does that.
    """
    folder = str(Path(__file__).parents[1])
    found = Rounds()
    with _folder() as environment:
        for number in range(rounds):
            program = (sys.executable, "-c", MISSES, folder, path, str(1000 * number))
            taken: Round = {}
            for name, launcher in (("bare", ()), ("run", KCACHE)):
                told = _run((*launcher, *program), environment).split()
                taken[f"{name}, first"], taken[name] = map(float, told)
            found.add(taken)
    return found


#: CuPy's way to a kernel. The device's architecture and the loading of the module are made up.
CUPY = """
import sys, time
from types import SimpleNamespace
from cupy.cuda import compiler
class Module:
    def load(self, cubin): pass
    def _set_mapping(self, mapping): pass
compiler.function = SimpleNamespace(Module=Module)
compiler._get_arch_for_options_for_nvrtc = lambda _arch=None: ("-arch=sm_90", "cubin")
start = time.perf_counter()
compiler._compile_module_with_cache(sys.argv[1], (), arch="90")
print(time.perf_counter() - start)
"""


def cupy(rounds: int) -> Rounds:
    """CuPy's first kernel of a process, from its own disk cache and by `kcache run`."""
    with _folder() as environment:
        program = (sys.executable, "-c", CUPY, SOURCE)
        own = {**environment, "CUPY_CACHE_DIR": environment["KCACHE_DIR"] + "-cupy"}
        ours = {**environment, "CUPY_CACHE_IN_MEMORY": "1"}
        tasks: list[Callable[[], Round]] = [
            lambda: {"own": float(_run(program, own))},
            lambda: {"run": float(_run((*KCACHE, *program), ours))},
        ]
        interleave(1, tasks)  # fills both caches
        return interleave(rounds, tasks)


CROWD = """
import sys
sys.path.insert(0, sys.argv[1])
from chapters.dropin import SOURCE, Interface
interface = Interface(sys.argv[2])
for number in range(20):
    assert len(interface.compile(SOURCE.encode() + b"// include %d" % number)["CUBIN"]) > 10000
"""


def crowd(path: str) -> dict[str, float]:
    """Many programs at once against one server: 20 hits of 100 KiB each."""
    folder = str(Path(__file__).parents[1])
    program = (sys.executable, "-c", CROWD, folder, path)
    with _folder() as environment:
        _run((*KCACHE, *program), environment)  # compiles
        count = f'for n in $(seq {PROGRAMS}); do {{ "$@" || echo failed; }} & done; wait'
        command = (*KCACHE, "sh", "-c", count, "sh", *program)
        start = time.perf_counter()
        output = _run(command, environment)
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "failed": float(output.count("failed")), "hits": PROGRAMS * 20.0}


# -- the chapter -----------------------------------------------------------------------------------


def dropin(plan: Plan, _folder: Path) -> Found:
    """A program under `kcache run`: its hits, its misses, its start."""
    found = library.find()
    if found is None:
        yield Absent("dropin", "kcache run", "NVRTC is not installed")
        return
    libraries.find(os.environ)
    rounds = max(3, plan.calls // 3)
    yield from _hits(found.path, rounds)
    start, miss = starting(rounds), misses(found.path, plan.costly)
    yield from _over("a program that compiles nothing", start, 0.030)
    yield from _over("a miss of a trivial kernel, the worker's cost included", miss, 0.005)
    what = "the first miss of a program, which loads NVRTC"
    yield Timing("dropin", what, "seconds: without", miss.summary("bare, first"))
    yield Timing("dropin", what, "seconds: with `kcache run`", miss.summary("run, first"))
    yield from _cupy(plan.costly)
    many = crowd(found.path)
    rate = many["hits"] / many["seconds"]
    told = f"{rate:.0f} hits/s, {many['failed']:.0f} programs failed"
    yield Fact(
        "dropin", f"{PROGRAMS} programs at once, 20 hits each", told, "none", not many["failed"]
    )


def _hits(path: str, rounds: int) -> Found:
    taken = hits(path, rounds)
    size = f"{taken['bytes'][0] / 1024:.0f} KiB of PTX and CUBIN"
    pairs = zip(taken["socket"], taken["in process"], strict=True)
    beyond = Summary.of(socket - inside for socket, inside in pairs)
    again = Summary.of(taken["repeated"])
    for name in ("socket", "in process", "repeated"):
        yield Timing("dropin", f"a hit, {name}", f"{size}: median", Summary.of(taken[name]))
    yield _at_most(f"a hit through the socket, {size}: beyond the in-process hit", beyond, 300e-6)
    yield _at_most("a hit again in one program", again, 20e-6)


def _over(what: str, rounds: Rounds, most: float) -> Found:
    yield Timing("dropin", what, "seconds: without", rounds.summary("bare"))
    yield Timing("dropin", what, "seconds: with `kcache run`", rounds.summary("run"))
    yield _at_most(f"{what}: beyond the same without", Summary.of(rounds.less("run", "bare")), most)


def _at_most(figure: str, taken: Summary, most: float) -> Fact:
    unit, factor = ("ms", 1e3) if most >= 1e-3 else ("us", 1e6)
    told = f"{taken.median * factor:.3g} {unit}"
    return Fact("dropin", figure, told, f"at most {most * factor:.3g} {unit}", taken.median <= most)


def _cupy(rounds: int) -> Found:
    if importlib.util.find_spec("cupy") is None:
        yield Absent("dropin", "CuPy, its disk cache", "CuPy is not installed")
        return
    yield Comparison("dropin", cupy(rounds)).ratio(
        "CuPy's first kernel of a process, `kcache run`",
        "run",
        "CuPy, its disk cache",
        "own",
        target=10,
        at_least=True,
    )


def main() -> None:
    """Measure from inside, under `kcache run`."""
    path, directory, rounds = sys.argv[1:]
    print(json.dumps(inside(path, directory, int(rounds))))
