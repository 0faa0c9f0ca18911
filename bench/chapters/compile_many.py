"""The chapter about many kernels that one process wants, compiled by several threads."""

import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from harness.corpus import Case, MissingHeadersError, load
from harness.findings import Absent, Comparison
from harness.main_job import Job
from harness.measure import Round, interleave
from harness.plan import Found, Plan
from harness.raw_nvrtc import compile_case

import kcache

THREADS = 2


def many(plan: Plan, folder: Path) -> Found:
    """One process that wants many cold kernels, by one thread and by two."""
    count = plan.kernels
    try:
        case = load("cub_reduce")
    except MissingHeadersError as error:
        yield Absent("many", "`cub_reduce`", str(error))
        return
    cases = [
        replace(case, names=(f"block_sum<float, {32 * (1 + n % 8)}, {1 + n // 8}>",))
        for n in range(count)
    ]
    jobs = [Job(each, folder) for each in cases]
    requests = [kcache.CompileRequest(job.case.source, job.case.names, job.options) for job in jobs]

    def together(threads: int) -> Round:
        with kcache.KernelCache(tempfile.mkdtemp(dir=folder)) as cache:
            start = time.perf_counter()
            results = cache.compile_many(requests, jobs=threads)
            seconds = time.perf_counter() - start
            if cache.stats().compiles != count or not all(map(_is_kernel, results)):
                raise RuntimeError("not all were compiled")
        return {f"many {threads}": seconds}

    def bare(threads: int) -> Round:
        return {f"bare {threads}": _bare(cases, threads)}

    tasks: list[Callable[[], Round]] = [
        partial(task, threads) for threads in (1, THREADS) for task in (together, bare)
    ]
    rounds = interleave(plan.costly, tasks)
    ratio = partial(Comparison("many", rounds).ratio, at_least=True)
    yield ratio(
        f"`compile_many` of {count} CUB kernels, {THREADS} threads",
        f"many {THREADS}",
        "one thread",
        "many 1",
        target=1.6,
    )
    yield ratio(
        f"bare NVRTC, the same {count} kernels, {THREADS} threads: its limit",
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
