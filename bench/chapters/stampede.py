"""The chapter about a stampede: one kernel that is cold, and wanted by many processes at once."""

import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

from contenders.contenders import BY_NAME, FILE_STREAM, available
from harness.corpus import MissingHeadersError, generated_source, load
from harness.findings import Absent, Comparison, Fact, Timing
from harness.main_job import Job
from harness.measure import Round, Rounds, clean_environment, interleave
from harness.plan import Found, Plan

import kcache

CROWD = 16
#: The length of a source in bytes that includes nothing and compiles for about half a second.
SOURCE = 128 << 10
OURS = "kcache `file`"

#: Gets a kernel in any way: compiled, waited for, or from the cache. Prints how often it compiled.
_GET = """\
import kcache
with open({source!r}, encoding="utf-8") as file:
    source = file.read()
with kcache.KernelCache({directory!r}) as cache:
    kernel = cache.get_or_compile(source, {names!r}, kcache.CompileOptions({options}))
    if not kernel.cubin:
        raise SystemExit("no code")
    print(cache.stats().compiles)
"""
#: What `Program.compile(cache=...)` does, written out so that its compiles can be counted.
_CORE_GET = """\
from cuda.core import ObjectCode, Program, ProgramOptions
from cuda.core.utils import FileStreamProgramCache, make_program_cache_key
with open({source!r}, encoding="utf-8") as file:
    source = file.read()
options = ProgramOptions(arch={arch!r}, std={std!r}, no_cache=True)
with FileStreamProgramCache({directory!r}) as cache:
    key = make_program_cache_key(
        code=source, code_type="c++", options=options, target_type="cubin"
    )
    found = cache.get(key)
    compiled = found is None
    if compiled:
        cache[key] = made = Program(source, "c++", options).compile("cubin")
    else:
        made = ObjectCode.from_cubin(found)
    if not made.code:
        raise SystemExit("no code")
print(int(compiled))
"""


def stampede(plan: Plan, folder: Path) -> Found:
    """Sixteen processes and one kernel with headers; the same without, beside the peer."""
    for part in (_sixteen, _beside):
        place = folder / part.__name__
        place.mkdir()
        yield from part(plan, place)


def _code(job: Job, directory: str) -> str:
    path = job.folder / "kernel.cu"
    path.write_text(job.case.source, encoding="utf-8")
    options = ", ".join(f"{name}={value!r}" for name, value in job.settings.items())
    return _GET.format(source=str(path), directory=directory, names=job.case.names, options=options)


def _start_and_wait(code: str, count: int, folder: Path) -> tuple[float, int]:
    """Starts so many processes at once.

    Returns the seconds until the last has ended, and the compiles that all of them made.
    """
    environment = clean_environment()
    start = time.perf_counter()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        for _ in range(count)
    ]
    codes = [process.wait() for process in processes]
    seconds = time.perf_counter() - start
    outputs = [process.communicate()[0] for process in processes]
    if any(codes):
        raise RuntimeError("a process failed")
    return seconds, sum(map(int, outputs))


# -- sixteen processes, a kernel with headers ------------------------------------------------------


def _sixteen(plan: Plan, folder: Path) -> Found:
    try:
        job = Job(load("cub_reduce"), folder)
    except MissingHeadersError as error:
        yield Absent("stampede", "`cub_reduce`", str(error))
        return
    compiles: list[int] = []

    def run(name: str, count: int, *, cold: bool) -> Round:
        place = tempfile.mkdtemp(dir=folder) if cold else str(job.directory)
        seconds, made = _start_and_wait(_code(job, place), count, folder)
        if cold and count > 1:
            with kcache.KernelCache(place) as cache:
                if cache.total_stats().compiles != made:
                    raise RuntimeError("the processes and their cache count differently")
            compiles.append(made)
        return {name: seconds}

    tasks = [
        partial(run, "one hot", 1, cold=False),
        partial(run, "one cold", 1, cold=True),
        partial(run, "all hot", CROWD, cold=False),
        partial(run, "all cold", CROWD, cold=True),
    ]
    interleave(1, [tasks[0], tasks[2]])
    rounds = interleave(plan.compiles, tasks)
    yield Fact(
        "stampede",
        f"compiles that {CROWD} processes make of one cold `cub_reduce`, each of {len(compiles)} "
        "rounds",
        ", ".join(map(str, sorted(set(compiles)))),
        "1",
        set(compiles) == {1},
    )
    for cold, hot in (("one cold", "one hot"), ("all cold", "all hot")):
        for column in zip(rounds[cold], rounds[hot], strict=True):
            rounds.add({f"{cold} less start": column[0] - column[1]})
    yield from _ratios(rounds)


def _ratios(rounds: Rounds) -> Found:
    ratio = Comparison("stampede", rounds).ratio
    figure = f"{CROWD} processes, one cold `cub_reduce`, until the last has ended"
    yield ratio(
        f"{figure}, less what {CROWD} processes that hit take",
        "all cold less start",
        "one process alone, less what one that hits takes",
        "one cold less start",
        target=1.15,
    )
    yield ratio(figure, "all cold", "one process alone", "one cold")
    for name, row in {
        "one hot": "one process that hits",
        "one cold": "one process that compiles",
        "all hot": f"{CROWD} processes that hit",
        "all cold": f"{CROWD} processes, one compile",
    }.items():
        column = "`cub_reduce`: from the first start to the last end"
        yield Timing("stampede", row, column, rounds.summary(name))


# -- sixteen processes, a kernel without headers, beside the peer ----------------------------------


def _beside(plan: Plan, folder: Path) -> Found:
    job = Job(generated_source(SOURCE), folder)
    compiles: dict[str, set[int]] = defaultdict(set)

    def run(who: str) -> Round:
        place = tempfile.mkdtemp(dir=folder)
        code = _code(job, place) if who == OURS else _core_code(job, place)
        seconds, made = _start_and_wait(code, CROWD, folder)
        compiles[who].add(made)
        return {who: seconds}

    peers, lacking = available("stampede", (BY_NAME[FILE_STREAM],))
    yield from lacking
    names = [OURS, *(each.name for each in peers)]
    rounds = interleave(plan.stampedes, [partial(run, name) for name in names])
    kernel = f"one cold kernel of {SOURCE >> 10} KiB"
    for name in names:
        made = sorted(compiles[name])
        figure = f"compiles of {kernel} by {CROWD} processes: {name}"
        target = "1" if name == OURS else ""
        found = ", ".join(map(str, made))
        yield Fact("stampede", figure, found, target, name != OURS or made == [1])
    for peer in peers:
        figure = f"{CROWD} processes, {kernel}, until the last has ended"
        yield Comparison("stampede", rounds).ratio(figure, OURS, peer.name, peer.name)


def _core_code(job: Job, directory: str) -> str:
    case = job.case
    return _CORE_GET.format(
        source=str(job.folder / "kernel.cu"), directory=directory, arch=case.arch, std=case.std
    )
