"""Cold against hot: a kernel from NVRTC alone, from a miss of kcache, and from a hit."""

import shutil
import sys
from pathlib import Path
from typing import Any

import corpus
import pytest
from contenders import BACKENDS, FILE_STREAM, IN_MEMORY, needs
from corpus import NAMES, Case
from keep import Keep
from programs import program, run

import kcache

COMPARED = "{kernel}, cold against hot"
#: A source whose compile starts a worker, so that the measured compile finds one that runs.
FIRST = 'extern "C" __global__ void first() {}\n'
ALONE = "NVRTC alone"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kernel" in metafunc.fixturenames:
        own = metafunc.config.getoption("--kernel")
        names = [*NAMES, *([own.stem] if own else [])]
        chosen = metafunc.definition.get_closest_marker("kernels")
        metafunc.parametrize("kernel", chosen.args if chosen else names)


@pytest.fixture
def case(kernel: str, pytestconfig: pytest.Config) -> Case:
    return corpus.load(kernel, pytestconfig)


def get(cache: kcache.KernelCache, case: Case) -> kcache.CompiledKernel:
    return cache.get_or_compile(case.source, case.names, case.options)


def filled(keep: Keep, case: Case, backend: str) -> Path:
    """Return the directory of a cache that holds the kernel.

    The kernel is got twice, because only the second time may kcache store that the headers have not
    changed for long.
    """
    place = keep.folder()
    for _ in range(2):
        with kcache.KernelCache(place, backend=backend) as cache:
            get(cache, case)
    return place


def opened(keep: Keep, case: Case, backend: str, memory: int | None, check: str) -> Any:
    place = keep(filled, case, backend)
    made = kcache.KernelCache(place, backend=backend, memory_size=memory, header_check=check)
    if not get(keep.enter_context(made), case).cached:
        raise RuntimeError(f"{case.name}: not a hit")
    return made


# -- cold ------------------------------------------------------------------------------------------


@pytest.mark.beside(COMPARED, ALONE)
def test_cold_by_nvrtc_alone(benchmark: Any, case: Case) -> None:
    needs("cuda.bindings.nvrtc")
    exec(program("NVRTC", Case("first", FIRST), ""))
    benchmark.pedantic(exec, (compile(program("NVRTC", case, ""), case.name, "exec"), {}))


@pytest.mark.beside(COMPARED, "kcache {backend}, a miss")
@pytest.mark.target("kcache file, a miss", ALONE, 1.05)
@pytest.mark.parametrize("backend", ["file"])
def test_cold(benchmark: Any, keep: Keep, case: Case, backend: str) -> None:
    _miss(benchmark, keep, case, backend)


@pytest.mark.beside(COMPARED, "kcache {backend}, a miss")
@pytest.mark.laps(2)
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_cold_with(benchmark: Any, keep: Keep, case: Case, backend: str) -> None:
    _miss(benchmark, keep, case, backend)


def _miss(benchmark: Any, keep: Keep, case: Case, backend: str) -> None:
    """Measure the first miss in a directory. Its worker runs, but has not read the headers yet.

    The group about programs measures what the start of a new process adds.
    """

    def empty() -> tuple[tuple[kcache.KernelCache, Case], dict[str, object]]:
        cache = keep.enter_context(kcache.KernelCache(keep.folder(), backend=backend))
        cache.get_or_compile(FIRST, (), kcache.CompileOptions(arch=corpus.ARCH))
        return (cache, case), {}

    kernel = benchmark.pedantic(get, setup=empty)
    if kernel.cached:
        raise RuntimeError("a hit in an empty cache")
    benchmark.extra_info["headers"] = len(kernel.dependencies)


# -- hot -------------------------------------------------------------------------------------------


@pytest.mark.beside(COMPARED, "kcache {backend}, hit from memory")
@pytest.mark.parametrize("backend", BACKENDS)
def test_hot_from_memory(benchmark: Any, keep: Keep, case: Case, backend: str) -> None:
    cache = keep(opened, case, backend, None, "always")
    benchmark(cache.get_or_compile, case.source, case.names, case.options)


@pytest.mark.beside(COMPARED, "kcache file, hit from memory, headers checked once")
def test_hot_headers_checked_once(benchmark: Any, keep: Keep, case: Case) -> None:
    cache = keep(opened, case, "file", None, "once")
    benchmark(cache.get_or_compile, case.source, case.names, case.options)


@pytest.mark.beside(COMPARED, "kcache {backend}, hit from disk")
@pytest.mark.parametrize("backend", BACKENDS)
def test_hot_from_disk(benchmark: Any, keep: Keep, case: Case, backend: str) -> None:
    cache = keep(opened, case, backend, 0, "always")
    benchmark(cache.get_or_compile, case.source, case.names, case.options)


@pytest.mark.beside(COMPARED, "kcache {backend}, hit in a new process")
@pytest.mark.parametrize("backend", BACKENDS)
def test_hot_in_a_new_process(benchmark: Any, keep: Keep, case: Case, backend: str) -> None:
    code = program("kcache", case, keep(filled, case, backend), backend=backend)
    if benchmark.pedantic(run, (code,), rounds=2) != "0\n":
        raise RuntimeError("not a hit")


# -- beside cuda.core ------------------------------------------------------------------------------

#: 4 KB of source without headers and name expressions, as cuda.core's `compile(cache=)` requires.
PLAIN = corpus.load("plain")
HIT = "hit of 4 KB of source in memory"


@pytest.mark.beside(HIT, "{contender}")
@pytest.mark.target("kcache file", IN_MEMORY, 1 / 7)
@pytest.mark.parametrize("contender", ["kcache file", IN_MEMORY])
def test_memory(benchmark: Any, keep: Keep, contender: str) -> None:
    if contender == IN_MEMORY:
        benchmark(*keep(_core_in_memory))
    else:
        cache = keep(opened, PLAIN, "file", None, "always")
        benchmark(cache.get_or_compile, PLAIN.source, (), PLAIN.options)


def _core_in_memory(keep: Keep) -> tuple[Any, str, Any]:
    core, utils = needs("cuda.core", "cuda.core.utils")
    options = core.ProgramOptions(arch=corpus.ARCH, std=corpus.STD)
    cache = utils.InMemoryProgramCache()

    def compile_(source: str, options: Any) -> Any:
        return core.Program(source, "c++", options).compile("cubin", cache=cache)

    compile_(PLAIN.source, options)
    return compile_, PLAIN.source, options


# -- a new process ---------------------------------------------------------------------------------

PROCESS = "a new process gets {kernel}, hot"


@pytest.mark.kernels("plain", "cutlass_gemm")
@pytest.mark.beside(PROCESS, "{contender}")
@pytest.mark.target("kcache", FILE_STREAM, 1 / 8, "bare interpreter")
@pytest.mark.parametrize("contender", ["bare interpreter", "kcache", FILE_STREAM, "CuPy"])
def test_new_process(benchmark: Any, keep: Keep, case: Case, contender: str) -> None:
    kind = {"bare interpreter": "nothing", FILE_STREAM: "cuda.core"}.get(contender, contender)
    if benchmark.pedantic(run, (keep(_hot, case, kind),), rounds=3) not in ("", "0\n"):
        raise RuntimeError("not a hit")


def _hot(keep: Keep, case: Case, kind: str) -> str:
    needs({"cuda.core": "cuda.core.utils", "CuPy": "cupy"}.get(kind, "kcache"))
    if kind == "CuPy" and case.names:
        pytest.skip("CuPy compiles no name expressions without a device")
    code = program(kind, case, keep(filled, case, "file") if kind == "kcache" else keep.folder())
    run(code)
    return code


# -- another checkout ------------------------------------------------------------------------------


@pytest.mark.kernels("attention", "cub_reduce", "cutlass_gemm")
@pytest.mark.beside("{kernel}, first hit of a process", "kcache, {where}")
@pytest.mark.target("kcache, second checkout", "kcache, at home", 1.2)
@pytest.mark.parametrize("where", ["at home", "second checkout"])
def test_second_checkout(benchmark: Any, keep: Keep, case: Case, where: str) -> None:
    """Get the kernel with a copy of all its headers in another folder, which is new to kcache."""
    directory = keep(_filled_at_home, case)
    home = keep(_checkout, case, 0)

    def arrive() -> tuple[tuple[str], dict[str, object]]:
        there = _checkout(keep, case, 1) if where == "second checkout" else home
        return (program("kcache", there, directory),), {}

    compiles = int(benchmark.pedantic(run, setup=arrive))
    benchmark.extra_info |= {"found": f"{compiles} compiles", "right": compiles == 0}


def _filled_at_home(keep: Keep, case: Case) -> Path:
    return filled(keep, keep(_checkout, case, 0), "file")


def _checkout(keep: Keep, case: Case, number: int) -> Case:
    """Return the kernel with a copy of the headers that it reads."""
    del number
    place = keep.folder(on_disk=False)
    paths = [Path(path) for path in case.include_paths]
    with kcache.KernelCache(keep(filled, case, "file")) as cache:
        read = [Path(each) for each in get(cache, case).dependencies]
    for number, root in enumerate(paths):
        for header in read:
            if header.is_relative_to(root):
                copy = place / str(number) / header.relative_to(root)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(header, copy)
        (place / str(number)).mkdir(exist_ok=True)
    there = tuple(str(place / str(number)) for number in range(len(paths)))
    return Case(case.name, case.source, case.names, there, case.more)


# -- programs without calls of kcache --------------------------------------------------------------

RUN = (sys.executable, "-m", "kcache", "run", "--")
STARTS = ("without kcache", "kcache run, first start", "kcache run, second start")


@pytest.mark.kernels("trivial", "cutlass_gemm")
@pytest.mark.beside("a program with {kernel}, from start to end", "{start}")
@pytest.mark.parametrize("start", STARTS)
def test_run(benchmark: Any, keep: Keep, case: Case, start: str) -> None:
    """Run a program that compiles with cuda.bindings, without and under `kcache run`."""
    needs("cuda.bindings.nvrtc")
    if start == STARTS[0]:
        benchmark.pedantic(run, (program("NVRTC", case, ""),))
    elif start == STARTS[1]:
        benchmark.pedantic(_run, setup=lambda: ((keep.folder(), case), {}))
    else:
        benchmark.pedantic(_run, (keep(_run_before, case), case), rounds=3)


def _run_before(keep: Keep, case: Case) -> Path:
    place = keep.folder()
    for _ in range(2):
        _run(place, case)
    return place


def _run(directory: Path, case: Case) -> None:
    # The command sets the variables, because this process has other values of them.
    launcher = ("env", f"KCACHE_DIR={directory}", f"XDG_RUNTIME_DIR={directory.parent}", *RUN)
    run(program("NVRTC", case, ""), *launcher)


@pytest.mark.beside("CuPy's first kernel of a process", "{start}")
@pytest.mark.parametrize("start", ["CuPy, its disk cache", "kcache run"])
def test_cupy(benchmark: Any, keep: Keep, start: str) -> None:
    needs("cupy")
    directory = keep.folder()
    by_kcache = ("env", "CUPY_CACHE_IN_MEMORY=1", f"KCACHE_DIR={directory}", *RUN)
    command = (program("CuPy", PLAIN, directory), *(by_kcache if start == "kcache run" else ()))
    run(*command)
    benchmark.pedantic(run, command, rounds=3)
