"""System calls: none for a hit from memory, few for the rest, no more among many entries."""

from __future__ import annotations

from pathlib import Path

import pytest
from guard.child import calls, measuring, no_strace
from guard.operations import HEADERS

pytestmark = pytest.mark.skipif(no_strace() is not None, reason=no_strace() or "")

_FEW, _MANY = 300, 10_000
#: At most so many calls on files. A put into files locks, checks and counts its shard before and
#: after it; LMDB begins and ends a transaction, and writes as many runs of pages as are free.
MOST = {
    "file": {
        "open and close": 30,
        "hit in memory": 0,
        "usage": 5,
        "hit": 5,
        "first hit of a key": 6,
        "miss": 1,
        "put": 23,
        "put again": 23,
        "delete": 12,
    },
    "lmdb": {
        "open and close": 140,
        "hit in memory": 0,
        "usage": 4,
        "hit": 4,
        "first hit of a key": 4,
        "miss": 4,
        "put": 20,
        "put again": 20,
        "delete": 20,
    },
    "kernels": {
        "kernel in memory": 0,
        # Each header, the working directory and its state, and the names of texts in memory.
        "kernel in memory, headers": HEADERS + 5,
        "kernel in file": 6,
        # ... and the table of mounts, which tells whether stamps last; see `_for_depth`.
        "kernel in file, headers": HEADERS + 15 + 6,
        "lookup that misses": 4,
    },
}


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_few_calls_and_no_more_among_many_entries(backend: str, tmp_path: Path) -> None:
    counts = []
    for number in (_FEW, _MANY):
        home = tmp_path.resolve() / str(number)
        home.mkdir()
        made = calls(measuring(home / "cache", backend, number), home)
        counts.append({name: len(each) for name, each in made.items()})
    few, many = counts
    assert list(few) == list(many) == list(MOST[backend])
    assert {name: n for name, n in few.items() if n > MOST[backend][name]} == {}
    # A deeper tree of LMDB has more pages, and free ones in more places.
    more = 0 if backend == "file" else 6
    assert {name: (few[name], n) for name, n in many.items() if n > few[name] + more} == {}


@pytest.mark.usefixtures("nvrtc")
def test_few_calls_for_kernels(tmp_path: Path) -> None:
    made = calls(measuring(tmp_path, "kernels"), tmp_path)
    assert set(made) == set(MOST["kernels"])
    most = MOST["kernels"] | {"kernel in file, headers": _for_depth(tmp_path)}
    assert {n: each for n, each in made.items() if len(each) > most[n]} == {}


def _for_depth(home: Path) -> int:
    """To find a header's mount, each part of its path is looked at; two parts are below `home`."""
    return MOST["kernels"]["kernel in file, headers"] + len(home.parts[1:]) + 2
