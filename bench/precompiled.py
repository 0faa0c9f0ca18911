"""Misses of kernels that begin alike, with precompiled headers and without, side by side.

    python bench/precompiled.py [--rounds 2] [--json FILE]

Each round has two new caches in this process: one is asked without `precompiled_headers`, one with
them, for a CUTLASS GEMM in several tile shapes and for a CUB reduction in several block sizes, one
after the other: whole misses, tracking and storing included. The first of each kernel makes the
precompiled header, and is shown by itself. Exits with 1 if a target is missed, or if an outcome
differs.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from corpus import Case, MissingHeadersError, load
from findings import Comparison, Fact, Findings
from machine import describe_machine, today, versions
from machine import load as load_average
from measure import Rounds
from raw_nvrtc import nvrtc_version

import kcache

CHAPTER = "precompiled"
#: TileM, TileN, TileK, WarpM, WarpN, Stages.
TILES = (
    (128, 128, 32, 64, 64, 3),
    (64, 64, 32, 32, 32, 3),
    (128, 64, 32, 64, 32, 3),
    (64, 128, 32, 32, 64, 3),
    (128, 128, 32, 64, 32, 3),
)
#: Type, threads, items per thread.
BLOCKS = (
    ("float", 256, 4),
    ("float", 128, 8),
    ("int", 256, 2),
    ("double", 64, 4),
    ("float", 512, 1),
)
#: What a miss shall gain from the second shape on.
TARGET = 1.6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    command = f"python bench/precompiled.py --rounds {arguments.rounds}"
    found = Findings(today(), command, describe_machine(), versions())
    gemm = [f"gemm<{', '.join(map(str, tile))}>" for tile in TILES]
    reduce = [f"block_sum<{', '.join(map(str, block))}>" for block in BLOCKS]
    try:
        families = [(load("cutlass_gemm"), gemm, TARGET), (load("cub_reduce"), reduce, None)]
    except MissingHeadersError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    for case, names, target in families:
        report(found, case, names, target, arguments.rounds)
    found.machine["load after"] = load_average()
    show(found)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
    met = all(ratio.met is not False for ratio in found.ratios)
    return 0 if met and all(fact.met for fact in found.facts) else 1


def show(found: Findings) -> None:
    for ratio in found.ratios:
        aim = "" if ratio.target is None else f"; at least {ratio.target}: {ratio.met}"
        ours, other, times = ratio.ours.median, ratio.other.median, ratio.ratio
        print(f"{ratio.figure} {ours:.2f} s, {ratio.against} {other:.2f} s")
        spread = f"{times.low:.2f} to {times.high:.2f}, {times.count} pairs"
        print(f"    ratio {times.median:.2f} ({spread}){aim}")
    for fact in found.facts:
        print(f"{fact.figure}: {fact.found}")


def report(
    found: Findings, case: Case, names: Sequence[str], target: float | None, rounds: int
) -> None:
    """Measures one family, and adds what was found out."""
    first, later, differ = Rounds(), Rounds(), 0
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="kcache-bench-") as folder:
            differ += measure(case, names, Path(folder), (first, later), swapped=number % 2 == 1)
    names_of = ("with precompiled headers", "precompiled", "without", "plain")
    for rounds_of, which, aim in ((first, "first", None), (later, "later", target)):
        comparison = Comparison(CHAPTER, rounds_of)
        figure, ours, against, other = names_of
        found.add(
            [
                comparison.ratio(
                    f"{case.name}: {which} misses {figure}",
                    ours,
                    against,
                    other,
                    target=aim,
                    at_least=which == "later",
                )
            ]
        )
    same = "equal" if not differ else f"{differ} differ"
    found.add([Fact(CHAPTER, f"{case.name}: code, names, log and key", same, "equal", not differ)])


def measure(
    case: Case, names: Sequence[str], folder: Path, rounds: tuple[Rounds, Rounds], *, swapped: bool
) -> int:
    """Asks two new caches for each kernel in turn; returns how many outcomes differ."""
    differ = 0
    with kcache.KernelCache(folder / "a") as plain, kcache.KernelCache(folder / "b") as other:
        # The compiler is loaded, and both caches know their place.
        for cache in (plain, other):
            cache.get_or_compile("__global__ void k() {}", (), kcache.CompileOptions(arch="sm_90"))
        asked = [("plain", plain, False), ("precompiled", other, True)]
        for number, name in enumerate(names):
            order = reversed(asked) if (number % 2 == 1) != swapped else asked
            seconds: dict[str, float] = {}
            made: list[kcache.CompiledKernel] = []
            for column, cache, precompiled in order:
                options = options_of(case).replace(precompiled_headers=precompiled)
                start = time.perf_counter()
                made.append(cache.get_or_compile(case.source, name, options))
                seconds[column] = time.perf_counter() - start
            rounds[number > 0].add(seconds)
            shown = ", ".join(f"{column} {seconds[column]:.2f} s" for column, _, _ in asked)
            print(f"{name}: {shown}", file=sys.stderr, flush=True)
            differ += made[0].replace(compile_seconds=0.0) != made[1].replace(compile_seconds=0.0)
    return differ


def options_of(case: Case) -> kcache.CompileOptions:
    # Templates alone: without a seed the names of internal symbols differ in each compile.
    extra = [*case.extra_options, f"--frandom-seed={case.name}"]
    if nvrtc_version() >= (12, 9):
        extra.append("--no-cache")
    return kcache.CompileOptions(
        arch=case.arch, std=case.std, include_paths=case.include_dirs, extra_options=extra
    )


if __name__ == "__main__":
    sys.exit(main())
