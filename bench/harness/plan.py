"""Plan: how often each thing is measured, and on how much."""

from collections.abc import Iterator
from dataclasses import dataclass

from harness.corpus import NAMES
from harness.findings import Absent, Fact, Point, Ratio, Timing

#: What a chapter yields.
Found = Iterator[Ratio | Fact | Timing | Point | Absent]

KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class Plan:
    """How often each thing is measured. Never less than three rounds of what has a target.

    Attributes:
        processes, calls, compiles: rounds of the chapters of the main job.
        costly: rounds of what takes many compiles, or one of many seconds.
        splits: misses taken apart by a stopwatch; 0 for none.
        stampedes: rounds of one to sixteen processes that want one kernel.
        kernels: how many kernels one process compiles in the chapter `many`.
        archs: what `kcache warm` compiles for...
        warmed: ... which kernels of the corpus.
        fills: rounds of puts at the cap.
        value_sizes: bytes of a value, in the chapter about sizes; must include 100 KiB.
        counts: the entries of the populations of 4 KiB; must include 1,000 and 10,000.
        file_counts: likewise, of 100 KiB, in files.
        million: the entries of the large population of LMDB, 1 KiB each; 0 leaves it out.
        memory_rounds: how often the memory of a process is taken.
        crowds: how many processes read or write at a time...
        crowd_rounds: ... how often...
        crowd_seconds: ... and for how long.
    """

    processes: int = 41
    calls: int = 41
    compiles: int = 7
    costly: int = 3
    stampedes: int = 3
    splits: int = 3
    kernels: int = 16
    archs: tuple[str, ...] = ("sm_80", "sm_90a", "sm_100a", "sm_120")
    warmed: tuple[str, ...] = NAMES
    fills: int = 9
    value_sizes: tuple[int, ...] = (KIB, 16 * KIB, 100 * KIB, 1024 * KIB, 16384 * KIB)
    counts: tuple[int, ...] = (100, 1_000, 10_000, 100_000)
    file_counts: tuple[int, ...] = (1_000, 10_000, 100_000)
    million: int = 1_000_000
    memory_rounds: int = 5
    crowds: tuple[int, ...] = (1, 2, 4, 8)
    crowd_rounds: int = 5
    crowd_seconds: float = 0.5


QUICK = Plan(
    processes=9,
    calls=15,
    compiles=3,
    stampedes=1,
    splits=0,
    kernels=4,
    archs=("sm_80", "sm_120"),
    warmed=NAMES[:-1],
    fills=5,
    counts=(100, 1_000, 10_000, 20_000),
    file_counts=(1_000, 10_000),
    million=0,
    memory_rounds=3,
    crowds=(1, 4),
    crowd_rounds=3,
    crowd_seconds=0.2,
)
