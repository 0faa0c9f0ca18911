"""The chapter about many kernels that one process wants: one at a time, and on two cores.

The limit is what two bare processes of NVRTC reach that share the kernels: threads of one process
wait for each other inside the compiler.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from harness.corpus import Case, MissingHeadersError, load
from harness.findings import Absent, Comparison
from harness.main_job import Job
from harness.measure import Round, clean_environment, interleave
from harness.plan import Found, Plan

import kcache

CORES = 2
#: The targets for two cores.
TARGET = 1.8

_BARE = """\
import json, sys
from dataclasses import replace
from harness.corpus import load
from harness.raw_nvrtc import compile_case
case = load("cub_reduce")
for name in json.loads(sys.argv[1]):
    compile_case(replace(case, names=(name,)))
"""


def many(plan: Plan, folder: Path) -> Found:
    """One process that wants many cold kernels, one at a time and on two cores."""
    count = plan.kernels
    try:
        case = load("cub_reduce")
    except MissingHeadersError as error:
        yield Absent("many", "`cub_reduce`", str(error))
        return
    names = [f"block_sum<float, {32 * (1 + n % 8)}, {1 + n // 8}>" for n in range(count)]
    tasks: list[Callable[[], Round]] = []
    for cores in (1, CORES):
        tasks += [
            partial(_together, case, names, cores, folder),
            partial(_bare, names, cores),
        ]
    rounds = interleave(plan.costly, tasks)
    ratio = partial(Comparison("many", rounds).ratio, against="one at a time", at_least=True)
    figure = f"`compile_many` of {count} CUB kernels, {CORES} at a time"
    yield ratio(figure, f"many {CORES}", other="many 1", target=TARGET)
    figure = f"bare NVRTC, the same {count} kernels, {CORES} processes: the limit"
    yield ratio(figure, f"bare {CORES}", against="bare NVRTC, one at a time", other="bare 1")
    beside = partial(Comparison("many", rounds).ratio, against=f"{CORES} processes of bare NVRTC")
    yield beside(f"`compile_many`, {CORES} at a time", f"many {CORES}", other=f"bare {CORES}")


def _together(case: Case, names: Sequence[str], jobs: int, folder: Path) -> Round:
    options = Job(case, folder).options
    requests = [kcache.CompileRequest(case.source, name, options) for name in names]
    with kcache.KernelCache(tempfile.mkdtemp(dir=folder)) as cache:
        start = time.perf_counter()
        results = cache.compile_many(requests, jobs=jobs)
        seconds = time.perf_counter() - start
        if cache.stats().compiles != len(names) or not all(map(_is_kernel, results)):
            raise RuntimeError("not all were compiled")
    return {f"many {jobs}": seconds}


def _is_kernel(result: object) -> bool:
    return isinstance(result, kcache.CompiledKernel)


def _bare(names: Sequence[str], processes: int) -> Round:
    """Compiles kernels by NVRTC alone in so many processes, from start to end."""
    bench = str(Path(__file__).parents[1])
    environment = clean_environment() | {"PYTHONPATH": bench}
    start = time.perf_counter()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _BARE, json.dumps(names[number::processes])],
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        for number in range(processes)
    ]
    failed = [process.args for process in started if process.wait() != os.EX_OK]
    if failed:
        raise RuntimeError("a process of bare compiles failed")
    return {f"bare {processes}": time.perf_counter() - start}
