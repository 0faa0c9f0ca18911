"""The chapter about precompiled headers: misses of kernels that begin alike, with them and without.

Each round has two new caches in this process: one is asked without `precompiled_headers`, one with
them, for the shapes of a family one after the other: whole misses, tracking and storing included.
The first two of each family are shown by themselves: the worker makes the precompiled header after
the first, and the second waits for that. Then `kcache warm` compiles tile shapes of the GEMM on two
cores with precompiled headers, beside one at a time without.
"""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from harness.corpus import Case, MissingHeadersError, load
from harness.findings import Absent, Comparison, Fact
from harness.measure import Round, Rounds, interleave
from harness.plan import Found, Plan

import kcache
from chapters.warm_up import kernel_list, run_warm

#: The parameters after the kernel's name, and the name of such a shape. Of the GEMM: TileM, TileN,
#: TileK, WarpM, WarpN, Stages; of the reduction: type, threads, items per thread.
SHAPES = {
    "cutlass_gemm": (
        "tile shape",
        (
            "gemm<128, 128, 32, 64, 64, 3>",
            "gemm<64, 64, 32, 32, 32, 3>",
            "gemm<128, 64, 32, 64, 32, 3>",
            "gemm<64, 128, 32, 32, 64, 3>",
            "gemm<128, 128, 32, 64, 32, 3>",
        ),
    ),
    "cub_reduce": (
        "block size",
        (
            "block_sum<float, 256, 4>",
            "block_sum<float, 128, 8>",
            "block_sum<int, 256, 2>",
            "block_sum<double, 64, 4>",
            "block_sum<float, 512, 1>",
        ),
    ),
}
#: The least gain of a miss from the third shape on.
TARGETS = {"cutlass_gemm": 1.6}
#: Makes the bytes of an outcome reproducible. If every external definition is a template, the
#: compiler puts a random number into the names of internal symbols.
_ANCHOR = '\nextern "C" __global__ void anchor() {}\n'
CORES = 2
#: The least gain of `kcache warm` from two cores and automatic precompiled headers.
WARM_TARGET = 2.5
#: TileM, TileN, WarpM, WarpN, Stages of tiles that fit into 48 KiB of shared memory.
_TILES = (
    (128, 128, 64, 64, 3),
    (64, 64, 32, 32, 3),
    (128, 64, 64, 32, 3),
    (64, 128, 32, 64, 3),
    (128, 128, 64, 32, 3),
    (64, 64, 32, 32, 4),
    (128, 64, 64, 32, 4),
    (64, 128, 32, 64, 4),
    (128, 64, 32, 32, 3),
    (64, 128, 32, 32, 3),
    (128, 64, 32, 32, 4),
    (64, 128, 32, 32, 4),
    (64, 64, 32, 32, 5),
    (64, 64, 32, 32, 6),
    (64, 64, 64, 32, 3),
    (64, 64, 32, 64, 3),
)


@dataclass
class Family:
    """A kernel in several shapes, and what was measured of the first two and of the later ones."""

    case: Case
    names: Sequence[str]
    first: Rounds = field(default_factory=Rounds)
    later: Rounds = field(default_factory=Rounds)
    differ: int = 0

    @property
    def options(self) -> kcache.CompileOptions:
        return kcache.CompileOptions(
            arch=self.case.arch,
            std=self.case.std,
            include_paths=self.case.include_dirs,
            extra_options=self.case.extra_options,
        )


def precompiled(plan: Plan, folder: Path) -> Found:
    """Misses of each shape of a family, without precompiled headers and with them."""
    for name in plan.families:
        shape, names = SHAPES[name]
        try:
            case = load(name)
        except MissingHeadersError as error:
            yield Absent("precompiled", f"`{name}`", str(error))
            continue
        family = Family(replace(case, source=case.source + _ANCHOR), names[: plan.shapes])
        # Each later shape makes a pair of its own, so one round has several.
        for number in range(1 if plan.splits == 0 else 2):
            with tempfile.TemporaryDirectory(dir=folder) as place:
                _measure(family, Path(place), swapped=number % 2 == 1)
        yield from _found(family, shape)
        if name == "cutlass_gemm":
            yield from _warmed(plan, case, folder)


def _warmed(plan: Plan, case: Case, folder: Path) -> Found:
    """`kcache warm` of tile shapes, processes from start to end."""
    names = [
        f"gemm<{m}, {n}, 32, {warp_m}, {warp_n}, {stages}>"
        for m, n, warp_m, warp_n, stages in _TILES[: plan.tiles]
    ]
    cases = [replace(case, names=(name,)) for name in names]
    columns: dict[str, tuple[int, bool | str]] = {
        "one": (1, False),
        "two": (CORES, False),
        "auto": (CORES, "auto"),
        "true": (CORES, True),
    }

    def warm(column: str) -> Round:
        jobs, precompiles = columns[column]
        path = folder / f"{column}.json"
        listed = kernel_list(cases, (case.arch,), precompiled=precompiles)
        path.write_text(json.dumps(listed), encoding="utf-8")
        seconds, processor, made = run_warm(path, tempfile.mkdtemp(dir=folder), jobs)
        if made["failed"] or made["compiled"] != len(names):
            raise RuntimeError(f"kcache warm: not everything was compiled: {made}")
        return {column: seconds, f"{column} cpu": processor / jobs}

    tasks: list[Callable[[], Round]] = [partial(warm, column) for column in columns]
    rounds = interleave(plan.tile_rounds, tasks)
    ratio = partial(
        Comparison("precompiled", rounds).ratio,
        against="one at a time, without",
        other="one",
        at_least=True,
    )
    what = f"`kcache warm` of {len(names)} tile shapes of `{case.name}`, {CORES} at a time"
    figure = f'{what}, `precompiled_headers="auto"`'
    yield ratio(figure, "auto", target=WARM_TARGET)
    yield ratio(f"{what}, `precompiled_headers=True`", "true")
    yield ratio(f"{what}, without", "two")
    share = partial(ratio, against="one at a time, without, processor time", other="one cpu")
    figure = f'{what}, `precompiled_headers="auto"`, processor time divided by {CORES}'
    yield share(figure, "auto cpu")
    figure = f"{what}, `precompiled_headers=True`, processor time divided by {CORES}"
    yield share(figure, "true cpu")


def _found(family: Family, shape: str) -> Found:
    name = family.case.name
    yield Comparison("precompiled", family.later).ratio(
        f"`{name}`, misses from the third {shape} on, with precompiled headers",
        "precompiled",
        "without",
        "plain",
        target=TARGETS.get(name),
        at_least=True,
    )
    figure = f"`{name}`, the misses of the first two {shape}s, between which they are precompiled"
    yield Comparison("precompiled", family.first).ratio(figure, "precompiled", "without", "plain")
    same = "equal" if not family.differ else f"{family.differ} differ"
    yield Fact(
        "precompiled", f"`{name}`, code, names, log and key", same, "equal", not family.differ
    )


def _measure(family: Family, folder: Path, *, swapped: bool) -> None:
    """Asks two new caches for each kernel in turn."""
    with kcache.KernelCache(folder / "a") as plain, kcache.KernelCache(folder / "b") as other:
        # The compiler is loaded, and both caches have opened their directories.
        for cache in (plain, other):
            cache.get_or_compile("__global__ void k() {}", (), kcache.CompileOptions(arch="sm_90"))
        asked = [("plain", plain, False), ("precompiled", other, True)]
        for number, name in enumerate(family.names):
            order = reversed(asked) if (number % 2 == 1) != swapped else asked
            seconds: dict[str, float] = {}
            made: list[kcache.CompiledKernel] = []
            for column, cache, precompiles in order:
                options = family.options.replace(precompiled_headers=precompiles)
                start = time.perf_counter()
                made.append(cache.get_or_compile(family.case.source, name, options))
                seconds[column] = time.perf_counter() - start
            (family.later if number > 1 else family.first).add(seconds)
            one, two = (kernel.replace(compile_seconds=0.0) for kernel in made)
            family.differ += one != two
