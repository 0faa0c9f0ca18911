"""Instructions: how many of Python's an operation executes, and how many hashes it begins.

Both are the same at every run and on every machine.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from guard.child import measuring, output
from guard.counts import VERSION, counted, headroom, table
from guard.scenarios import BACKENDS, SCENARIOS

TABLE = table()
REFRESH = "to measure the table anew: `python -m guard.counts` in tests/, once for each Python"

needs_table = pytest.mark.skipif(TABLE is None, reason=f"no table for Python {VERSION}; {REFRESH}")


@pytest.fixture(scope="module")
def counts(folder: Path, has_compiler: bool) -> dict[str, int]:
    place = folder / "counts"
    place.mkdir()
    return counted(place, compiler=has_compiler)


@needs_table
@pytest.mark.parametrize("name", TABLE or {})
def test_as_many_as_in_the_table(
    name: str, counts: dict[str, int], request: pytest.FixtureRequest
) -> None:
    if SCENARIOS[name].compiler:
        request.getfixturevalue("nvrtc")
    assert TABLE is not None
    count, told, share = counts[name], TABLE[name], headroom()
    assert count <= told * (1 + share), f"{name} takes {count} instructions, not {told}"
    assert count >= told * (1 - share), f"{name} takes {count} only, not {told}: {REFRESH}"


@needs_table
def test_the_table_is_complete(counts: dict[str, int], has_compiler: bool) -> None:
    assert TABLE is not None
    assert set(counts) == {n for n in TABLE if has_compiler or not SCENARIOS[n].compiler}


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_hit_in_a_layer_takes_a_fifth_more_at_most(backend: str, counts: dict[str, int]) -> None:
    plain = counts[f"kernel: hit in {backend}"]
    assert counts[f"kernel: hit in a layer, {backend}"] <= 1.2 * plain


def test_it_counts_the_same_again(counts: dict[str, int], tmp_path: Path) -> None:
    again = counted(tmp_path, compiler=False)
    assert again == {name: counts[name] for name in again}


# -- hashes ----------------------------------------------------------------------------------------

#: (SHA-256, XXH3): where a key is made anew it is of source, options and all fields, and the place
#: where it is asked for, by spelling and by directory; a hit's envelope is checked once, and one that is put gets its checksum.
_KEYS = {"key": (3, 0), "request": (5, 0)}
_KERNELS = {
    "hit in memory": (0, 0),
    "hit in memory, headers": (1, 0),  # the key of source and headers together
    "hit in file": (5, 1),
    "hit in file, headers": (6, 2),  # the kernel, and the list of its headers
    "hit in lmdb": (5, 1),
    "hit in lmdb, headers": (6, 2),
    "lookup that misses": (6, 0),
    "open and close": (0, 0),
    "hit in a layer, file": (5, 1),
    "hit in a layer, lmdb": (5, 1),
}
#: The scenarios of a put and of a miss make the key that they ask for, which is one SHA-256.
_ENGINE = {
    "hit": (0, 1),
    "first hit of a key": (0, 1),
    "miss": (1, 0),
    "put": (1, 1),
    "put again": (1, 1),
    "delete": (0, 0),
    "usage": (0, 0),
    "open and close": (0, 0),
}
HASHED = {
    "memory: hit": (0, 0),
    **{f"{backend}: {name}": count for backend in BACKENDS for name, count in _ENGINE.items()},
    **_KEYS,
    **{f"kernel: {name}": count for name, count in _KERNELS.items()},
}


@pytest.fixture(scope="module")
def hashes(folder: Path, has_compiler: bool) -> dict[str, dict[str, int]]:
    place = folder / "hashes"
    place.mkdir()
    found: dict[str, dict[str, int]] = json.loads(
        output(measuring("hashes", place, compiler=has_compiler), place)
    )
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_hashed_twice(
    name: str, hashes: dict[str, dict[str, int]], request: pytest.FixtureRequest
) -> None:
    if SCENARIOS[name].compiler:
        request.getfixturevalue("nvrtc")
    assert tuple(hashes[name].values()) == HASHED[name]
