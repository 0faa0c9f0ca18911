"""Plan: how often each thing is measured, and on how much."""

from collections.abc import Iterator
from dataclasses import dataclass

from findings import Absent, Fact, Point, Ratio, Timing

#: What a chapter yields.
Found = Iterator[Ratio | Fact | Timing | Point | Absent]

KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class Plan:
    """How often each thing is measured. Never less than five rounds of what is compared.

    Attributes:
        processes, calls, compiles, splits: rounds of the chapters of the main job.
        fills: rounds of puts at the cap.
        few, many: the entries of the small and the large population of a storage chapter.
        file_payload: bytes of an entry there, in files; 4 KiB in LMDB.
        sizes: the populations of LMDB with entries of 1 KiB.
        crowds: how many processes read or write at a time...
        crowd_rounds: ... how often...
        crowd_seconds: ... and for how long.
    """

    processes: int = 41
    calls: int = 41
    compiles: int = 11
    splits: int = 5
    fills: int = 9
    few: int = 1_000
    many: int = 100_000
    file_payload: int = 100 * KIB
    sizes: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    crowds: tuple[int, ...] = (1, 2, 4, 8)
    crowd_rounds: int = 5
    crowd_seconds: float = 1.0


QUICK = Plan(
    processes=11,
    calls=15,
    compiles=5,
    splits=2,
    fills=5,
    many=20_000,
    file_payload=4 * KIB,
    sizes=(1_000, 10_000, 50_000),
    crowds=(1, 4),
    crowd_rounds=1,
    crowd_seconds=0.3,
)
