"""Crowds: one kernel for many processes, many kernels for one process, and ranks bound to cores."""

import os
from dataclasses import replace
from typing import Any

import corpus
import pytest
from contenders import FILE_STREAM, needs
from corpus import Case
from keep import Keep
from programs import program, run_at_once

import kcache

CORES = 2

# -- one kernel ------------------------------------------------------------------------------------

CROWD = 16
#: Bytes of a source that includes nothing and takes half a second to compile. An argument of a
#: process can have 128 KiB at most.
SOURCE = 96 << 10


@pytest.mark.laps(3)
@pytest.mark.beside(f"{CROWD} processes want one cold kernel", "{contender}")
@pytest.mark.parametrize("contender", ["kcache", "kcache, one process alone", FILE_STREAM])
def test_stampede(benchmark: Any, keep: Keep, contender: str) -> None:
    case, kind = corpus.generated(SOURCE), "kcache" if "kcache" in contender else "cuda.core"
    needs("kcache" if kind == "kcache" else "cuda.core.utils")
    count = 1 if "alone" in contender else CROWD

    def cold() -> tuple[tuple[list[str]], dict[str, object]]:
        return ([program(kind, case, keep.folder())] * count,), {}

    compiles = sum(map(int, benchmark.pedantic(run_at_once, setup=cold)))
    benchmark.extra_info |= {"found": str(compiles), "right": compiles == 1}


# -- many kernels ----------------------------------------------------------------------------------

MANY = 8
ONE, SEVERAL = "kcache, one at a time", f"kcache, {CORES} at a time"


@pytest.fixture
def cases() -> list[Case]:
    case = corpus.load("cub_reduce")
    names = [f"block_sum<float, {32 * (1 + number)}, 4>" for number in range(MANY)]
    return [replace(case, names=(name,)) for name in names]


@pytest.mark.laps(3)
@pytest.mark.beside(f"{MANY} cold kernels of CUB", "{contender}")
@pytest.mark.target(SEVERAL, ONE, 1 / 1.8)
@pytest.mark.parametrize("contender", [SEVERAL, ONE, f"NVRTC alone, {CORES} processes"])
def test_compile_many(benchmark: Any, keep: Keep, cases: list[Case], contender: str) -> None:
    if not contender.startswith("kcache"):
        codes = [
            "".join(program("NVRTC", each, "") for each in cases[n::CORES]) for n in range(CORES)
        ]
        benchmark.pedantic(run_at_once, (codes,))
        return
    requests = [kcache.CompileRequest(each.source, each.names, each.options) for each in cases]

    def cold() -> tuple[tuple[kcache.KernelCache], dict[str, object]]:
        return (keep.enter_context(kcache.KernelCache(keep.folder())),), {}

    def compile_many(cache: kcache.KernelCache) -> int:
        cache.compile_many(requests, jobs=CORES if contender == SEVERAL else 1)
        return cache.stats().compiles

    compiles = benchmark.pedantic(compile_many, setup=cold)
    benchmark.extra_info |= {"found": f"{compiles} compiles", "right": compiles == MANY}


# -- ranks -----------------------------------------------------------------------------------------

SHARED = 4


@pytest.mark.laps(3)
@pytest.mark.beside(f"ranks bound to a core each want {SHARED} cold kernels", "{contender}")
@pytest.mark.parametrize("contender", ["kcache", "NVRTC alone"])
def test_ranks(benchmark: Any, keep: Keep, cases: list[Case], contender: str) -> None:
    kind = "kcache" if contender == "kcache" else "NVRTC"

    def cold() -> tuple[tuple[list[str]], dict[str, object]]:
        place = keep.folder()
        code = "".join(program(kind, each, place) for each in cases[:SHARED])
        cores = sorted(os.sched_getaffinity(0))
        bound = [f"import os; os.sched_setaffinity(0, {{{core}}})\n{code}" for core in cores]
        return (bound,), {}

    printed = benchmark.pedantic(run_at_once, setup=cold)
    if kind == "kcache":
        compiles = sum(map(int, " ".join(printed).split()))
        benchmark.extra_info |= {"found": f"{compiles} compiles", "right": compiles == SHARED}
