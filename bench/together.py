"""The chapter about work that is shared: one kernel wanted by many processes, many by one."""

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from corpus import Case, load
from findings import Comparison, Fact, Timing
from main_job import Job
from measure import Round, interleave
from plan import Found, Plan
from raw_nvrtc import compile_case

import kcache

CROWD = 16
KERNELS = 16
THREADS = 2

#: Gets a kernel, however: compiled, waited for, or there.
_GET = """\
import kcache
with kcache.KernelCache({directory!r}) as cache:
    kernel = cache.get_or_compile(
        {source!r}, {names!r}, kcache.CompileOptions({options})
    )
    if not kernel.cubin:
        raise SystemExit("no code")
"""


# -- sixteen processes, one kernel ---------------------------------------------------------------


def stampede(plan: Plan, folder: Path) -> Found:
    """Sixteen processes that want one cold kernel at the same time."""
    job = Job(load("cub_reduce"), folder)
    compiles: list[int] = []

    def run(name: str, count: int, *, cold: bool) -> Round:
        place = tempfile.mkdtemp(dir=job.folder) if cold else str(job.directory)
        options = ", ".join(f"{name}={value!r}" for name, value in job.settings.items())
        code = _GET.format(
            directory=place, source=job.case.source, names=job.case.names, options=options
        )
        seconds = _start_and_wait(code, count)
        if cold and count > 1:
            with kcache.KernelCache(place) as cache:
                compiles.append(cache.total_stats().compiles)
        return {name: seconds}

    tasks = [
        partial(run, "one hot", 1, cold=False),
        partial(run, "one cold", 1, cold=True),
        partial(run, "all hot", CROWD, cold=False),
        partial(run, "all cold", CROWD, cold=True),
    ]
    interleave(1, tasks)
    compiles.clear()
    rounds = interleave(plan.compiles, tasks)
    yield Fact(
        "stampede",
        f"compiles that {CROWD} processes make of one cold kernel, each of {len(compiles)} rounds",
        ", ".join(map(str, sorted(set(compiles)))),
        "1",
        set(compiles) == {1},
    )
    for cold, hot in (("one cold", "one hot"), ("all cold", "all hot")):
        for column in zip(rounds[cold], rounds[hot], strict=True):
            rounds.add({f"{cold} less start": column[0] - column[1]})
    ratio = Comparison("stampede", rounds).ratio
    yield ratio(
        f"{CROWD} processes, one cold `cub_reduce`, until the last has ended, less what {CROWD} "
        "processes that hit take",
        "all cold less start",
        "one process alone, less what one that hits takes",
        "one cold less start",
        target=1.15,
    )
    yield ratio(
        f"{CROWD} processes, one cold `cub_reduce`, until the last has ended",
        "all cold",
        "one process alone",
        "one cold",
    )
    for name, row in {
        "one hot": "one process that hits",
        "one cold": "one process that compiles",
        "all hot": f"{CROWD} processes that hit",
        "all cold": f"{CROWD} processes, one compile",
    }.items():
        column = "`cub_reduce`: from the first start to the last end"
        yield Timing("stampede", row, column, rounds.summary(name))


def _start_and_wait(code: str, count: int) -> float:
    """Starts so many processes at once; returns the seconds until the last has ended."""
    start = time.perf_counter()
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    codes = [process.wait() for process in processes]
    seconds = time.perf_counter() - start
    if any(codes):
        raise RuntimeError("a process failed")
    return seconds


# -- one process, sixteen kernels ----------------------------------------------------------------


def many(plan: Plan, folder: Path) -> Found:
    """One process that wants sixteen cold kernels, by one thread and by two."""
    case = load("cub_reduce")
    cases = [
        replace(case, names=(f"block_sum<float, {32 * (1 + n % 8)}, {1 + n // 8}>",))
        for n in range(KERNELS)
    ]
    jobs = [Job(each, folder) for each in cases]
    requests = [kcache.CompileRequest(job.case.source, job.case.names, job.options) for job in jobs]

    def together(threads: int) -> Round:
        with kcache.KernelCache(tempfile.mkdtemp(dir=folder)) as cache:
            start = time.perf_counter()
            results = cache.compile_many(requests, jobs=threads)
            seconds = time.perf_counter() - start
            if cache.stats().compiles != KERNELS or not all(map(_is_kernel, results)):
                raise RuntimeError("not all were compiled")
        return {f"many {threads}": seconds}

    def bare(threads: int) -> Round:
        return {f"bare {threads}": _bare(cases, threads)}

    tasks: list[Callable[[], Round]] = [
        partial(task, threads) for threads in (1, THREADS) for task in (together, bare)
    ]
    rounds = interleave(plan.splits, tasks)
    ratio = partial(Comparison("many", rounds).ratio, at_least=True)
    yield ratio(
        f"`compile_many` of {KERNELS} CUB kernels, {THREADS} threads",
        f"many {THREADS}",
        "one thread",
        "many 1",
        target=1.6,
    )
    yield ratio(
        f"bare NVRTC, the same {KERNELS} kernels, {THREADS} threads: its limit",
        f"bare {THREADS}",
        "one thread",
        "bare 1",
    )


def _is_kernel(result: object) -> bool:
    return isinstance(result, kcache.CompiledKernel)


def _bare(cases: list[Case], threads: int) -> float:
    """Compiles cases by NVRTC alone in so many threads; returns the seconds."""
    waiting: SimpleQueue[Case] = SimpleQueue()
    for case in cases:
        waiting.put(case)

    def work() -> None:
        while True:
            try:
                case = waiting.get_nowait()
            except Empty:
                return
            compile_case(case)

    start = time.perf_counter()
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start
