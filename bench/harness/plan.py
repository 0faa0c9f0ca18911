"""Plan: how often each thing is measured, and on how much."""

from collections.abc import Iterator
from dataclasses import dataclass

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
        brief: whether what takes many seconds is compiled once only by the peer.
        stampedes: rounds of sixteen processes that want one kernel without headers.
        kernels: how many kernels one process compiles in the chapter `many`.
        fills: rounds of puts at the cap.
        value_sizes: bytes of a value, in the chapter about sizes; must include 100 KiB.
        counts: the entries of the populations of 4 KiB; must include 1,000 and 10,000.
    """

    processes: int = 41
    calls: int = 41
    compiles: int = 7
    costly: int = 3
    stampedes: int = 3
    brief: bool = False
    kernels: int = 16
    fills: int = 9
    value_sizes: tuple[int, ...] = (KIB, 16 * KIB, 100 * KIB, 1024 * KIB, 16384 * KIB)
    counts: tuple[int, ...] = (100, 1_000, 10_000, 100_000)


QUICK = Plan(
    processes=9,
    calls=15,
    compiles=3,
    stampedes=1,
    brief=True,
    kernels=4,
    fills=5,
    counts=(100, 1_000, 10_000, 20_000),
)
