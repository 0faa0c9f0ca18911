"""The chapter about the main job: every kernel of the corpus, compiled once and hit ever after."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from contenders.contenders import CUDA_CORE, FILE_STREAM, IN_MEMORY, available
from contenders.cuda_core import CoreCache
from harness.corpus import NAMES, MissingHeadersError, load
from harness.findings import Absent, Comparison, Fact, Ratio, Timing
from harness.main_job import Job
from harness.measure import Round, Rounds, Summary, interleave
from harness.plan import Found, Plan

#: The most that a miss may take, as a ratio to the bare compile.
MISS_TARGETS = {"cub_reduce": 1.04, "cub_radix_sort": 1.04, "cutlass_gemm": 1.05}
#: How many seconds a miss of the smallest kernel may take beyond the bare compile.
ADDED = 0.003
#: How many pairs of a miss and a bare compile show it. In three pairs, noise hides some
#: milliseconds.
_PAIRS = 21
HIT_TARGETS = {"cutlass_gemm": 1 / 1000}
#: Kernels that take many seconds to compile.
COSTLY = ("cutlass_gemm",)

_COLUMNS = {
    "bare NVRTC": "bare",
    "cold (miss)": "miss",
    "hot, fresh process": "process",
    "of which look-up": "look-up",
    "hot from disk": "disk",
    "hot from memory": "memory",
}
_ONCE = {'hot from memory, `header_check="once"`': "once"}
_PEER_COLUMNS = {
    f"{FILE_STREAM}, cold": "peer cold",
    f"{FILE_STREAM}, hot, fresh process": "peer process",
    f"{FILE_STREAM}, hot": "peer disk",
    f"{IN_MEMORY}, hot": "peer memory",
}


def kernels(plan: Plan, folder: Path) -> Found:
    """The kernels of the corpus: compiled bare, cold, and hit in every way, beside cuda.core."""
    known, lacking = available("kernels", CUDA_CORE)
    yield from lacking
    peer = len(known) == len(CUDA_CORE)
    for name in NAMES:
        place = folder / name
        place.mkdir()
        try:
            case = load(name)
        except MissingHeadersError as error:
            yield Absent("kernels", f"`{name}`", str(error))
            continue
        yield from _kernel(plan, Job(case, place), CoreCache(case, place) if peer else None)


def _kernel(plan: Plan, job: Job, peer: CoreCache | None) -> Found:
    name = job.case.name
    with job.memory_cache, job.disk_cache, job.once_cache:
        headers = job.hit(job.memory_cache).dependencies
        hits: list[Callable[[], Round]] = [job.disk, job.memory, job.fresh_process]
        tasks: list[Callable[[], Round]] = [job.bare, job.miss, *hits]
        # For a kernel that takes many seconds, a quick run has one cold compile by cuda.core and no
        # ratio.
        brief = name in COSTLY and plan.brief
        if headers:
            hits.append(job.once)
            tasks.append(job.once)
        filled: Round = {}
        if peer is not None:
            beside: list[Callable[[], Round]] = [peer.disk, peer.memory, peer.fresh_process]
            filled = peer.cold()
            hits += beside
            tasks += beside
            if not brief:
                tasks.append(peer.cold)
        interleave(1, hits)
        rounds = interleave(plan.costly if name in COSTLY else plan.compiles, tasks)
        if brief:
            rounds.add(filled)
    columns = _COLUMNS | (_ONCE if headers else {}) | (_PEER_COLUMNS if peer is not None else {})
    for column, key in columns.items():
        row = f"`{name}`, {len(headers)} headers"
        yield Timing("kernels", row, f"kernel: {column}", rounds.summary(key))
    yield from _beside_bare(name, len(headers), rounds)
    if not headers:
        yield _added(name, interleave(_PAIRS, [job.bare, job.miss]))
    if peer is not None:
        yield from _beside_peer(name, len(headers), rounds)


def _beside_bare(name: str, headers: int, rounds: Rounds) -> Found:
    ratio = partial(Comparison("kernels", rounds).ratio, against="bare NVRTC compile")
    miss, hit = f"`{name}`, miss", f"`{name}`, {_verified(headers)}"
    yield ratio(miss, "miss", other="bare", target=MISS_TARGETS.get(name))
    figure = f"`{name}`, the compile in the worker, which records"
    yield ratio(figure, "inside", other="bare")
    target = HIT_TARGETS.get(name)
    yield ratio(f"{hit}, from memory", "memory", other="bare", target=target)
    yield ratio(f"{hit}, from disk", "disk", other="bare", target=target)
    yield ratio(f"{hit}, in a fresh process, its start included", "process", other="bare")


def _added(name: str, pairs: Rounds) -> Fact:
    added = Summary.of(pairs.less("miss", "bare")).median
    figure = f"`{name}`, miss: what it adds to the bare compile, median of {_PAIRS} pairs"
    return Fact("kernels", figure, f"{added * 1e3:.1f} ms", "3 ms at most", added <= ADDED)


def _beside_peer(name: str, headers: int, rounds: Rounds) -> Found:
    ratio = Comparison("kernels", rounds).ratio
    hit = f"`{name}`, {_verified(headers)}"
    lax = "hit, no header verified" if headers else "hit"
    if len(rounds["peer cold"]) == len(rounds["miss"]):
        yield ratio(f"`{name}`, cold", "miss", f"{FILE_STREAM}, cold", "peer cold")
    fresh = f"{hit}, in a fresh process, its start included"
    yield ratio(fresh, "process", f"{FILE_STREAM} {lax}, likewise", "peer process")
    yield ratio(f"{hit}, from disk", "disk", f"{FILE_STREAM} {lax}", "peer disk")
    yield ratio(f"{hit}, from memory", "memory", f"{IN_MEMORY} {lax}", "peer memory")
    if headers:
        once = f"`{name}`, hit, headers verified once per process, from memory"
        yield ratio(once, "once", f"{IN_MEMORY} {lax}", "peer memory")
    yield Ratio(
        "kernels",
        f"`{name}`, peak resident memory of the fresh process",
        f"{FILE_STREAM}, likewise",
        "B",
        rounds.summary("peak"),
        rounds.summary("peer peak"),
        rounds.ratio("peak", "peer peak"),
    )


def _verified(headers: int) -> str:
    return f"hit, {headers} headers verified" if headers else "hit"
