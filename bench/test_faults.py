"""Faults: what each cache does after a fault. The results are facts in `extra_info`, not times."""

from typing import Any

import probes
import pytest
from contenders import CUPY, EVERYTHING, FILE_STREAM, ON_DISK, OURS
from keep import Keep

KERNELS = [*OURS, FILE_STREAM, CUPY]
FAULTS = {
    "cut": ("the file of an entry is cut short", [*ON_DISK]),
    "flipped": ("one bit of a value is damaged", [*ON_DISK]),
    "header": ("a header is edited", KERNELS),
    "full": ("the disk is full during a compile", KERNELS),
    "writers": ("8 writers, cap of 1 MB: on disk", [*ON_DISK]),
}


@pytest.mark.laps(1)
@pytest.mark.beside("{what}", "{contender}")
@pytest.mark.parametrize(
    ("fault", "what", "contender"),
    [
        pytest.param(fault, what, each, id=f"{fault}-{each}")
        for fault, (what, those) in FAULTS.items()
        for each in those
    ],
)
def test_fault(benchmark: Any, keep: Keep, fault: str, what: str, contender: str) -> None:
    del what
    EVERYTHING[contender](keep.folder(), None).close()  # skips a contender that is not installed
    found, right = benchmark.pedantic(probes.run, (fault, contender, keep.folder()))
    benchmark.extra_info |= {"found": found, "right": right}
