"""The chapter about headers: what it takes to verify a hit, against how many headers it has."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from contenders.contenders import CUDA_CORE, FILE_STREAM, IN_MEMORY, available
from contenders.cuda_core import CoreCache
from harness.corpus import Case
from harness.findings import Comparison, Point
from harness.main_job import Job
from harness.measure import Round, interleave, per_call
from harness.plan import Found, Plan

import kcache

COUNTS = (1, 10, 100, 1_000)
#: Every hit reads a header again if the header had changed less than two seconds before it was
#: read.
SETTLED = 2.5
CHART = "a hit, all headers verified; cuda.core verifies none"

_KERNEL = 'extern "C" __global__ void sum(int* out)\n{{\n    *out = {sum};\n}}\n'
_HEADER = "#pragma once\n__device__ inline int f{number}() {{ return {number}; }}\n"


def headers(plan: Plan, folder: Path) -> Found:
    """Hits of a kernel that includes 1 to 1,000 headers, none of which has changed."""
    cases = [_case(folder / str(count), count) for count in COUNTS]
    time.sleep(SETTLED)
    known, lacking = available("headers", CUDA_CORE)
    yield from lacking
    peer = len(known) == len(CUDA_CORE)
    for case, count in zip(cases, COUNTS, strict=True):
        yield from _verified(plan, case, count, folder / str(count), peer=peer)


def _case(folder: Path, count: int) -> Case:
    """Writes so many headers into a new folder; returns a kernel that includes them all."""
    place = folder / "include"
    place.mkdir(parents=True)
    for number in range(count):
        text = _HEADER.format(number=number)
        (place / f"header{number}.h").write_text(text, encoding="utf-8")
    includes = "".join(f'#include "header{number}.h"\n' for number in range(count))
    total = " + ".join(f"f{number}()" for number in range(count))
    return Case(f"headers_{count}", includes + _KERNEL.format(sum=total), ("sum",), (place,))


def _verified(plan: Plan, case: Case, count: int, folder: Path, *, peer: bool) -> Found:
    job = Job(case, folder)
    with job.memory_cache as in_memory, job.disk_cache as on_disk:
        found = job.hit(in_memory).dependencies
        if len(found) != count:
            raise RuntimeError(f"{len(found)} headers were followed, not {count}")
        loops = max(4, 400 // count)
        series: dict[str, tuple[str, Callable[[], Round]]] = {
            "kcache `file`": ("ours", _hits("kcache `file`", job, on_disk, loops)),
            "kcache memory": ("ours", _hits("kcache memory", job, in_memory, loops)),
            "os.stat": ("floor", per_call("os.stat", partial(_stat, found), loops)),
        }
        if peer:
            core = CoreCache(case, folder)
            for name, cache in ((FILE_STREAM, core.disk_cache), (IN_MEMORY, core.memory_cache)):
                series[name] = ("peer", per_call(name, partial(core.request, cache), 50))
        tasks = [task for _, task in series.values()]
        interleave(2, tasks)
        rounds = interleave(plan.calls, tasks)
    for name, (role, _) in series.items():
        yield Point("headers", CHART, name, role, count, "headers", "s", rounds.summary(name))
    if count == COUNTS[-1]:
        ratio = partial(Comparison("headers", rounds).ratio, other="os.stat")
        files = f"os.stat of {count:,} files"
        yield ratio(f"hit from memory, {count:,} headers verified", "kcache memory", files)
        yield ratio(f"hit from disk, {count:,} headers verified", "kcache `file`", files)


def _hits(name: str, job: Job, cache: kcache.KernelCache, loops: int) -> Callable[[], Round]:
    return per_call(name, partial(job.hit, cache), loops)


def _stat(paths: tuple[str, ...]) -> None:
    for path in paths:
        os.stat(path)  # `pathlib` would be slower
