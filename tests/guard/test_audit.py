"""Files that an operation opens, looks at or changes, as Python itself tells, on every system.

The same operations are asserted call by call in test_calls.py, where strace works.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from guard.child import measuring, output
from guard.scenarios import BACKENDS, HEADERS, SCENARIOS

#: A put into a file: its shard is locked, the value written beside its name, and then renamed.
_PUT = ["fcntl.fcntl", "open", "utime", "rename", "fcntl.fcntl"]
FILE = {
    "hit": ["open"],
    "first hit of a key": ["open", "utime"],
    "miss": ["open"],
    "put": _PUT,
    "put again": _PUT,
    "delete": ["fcntl.fcntl", "remove", "fcntl.fcntl"],
    "usage": [],
    "open and close": ["open", "open"],  # the marker, the counters
}
#: Calls of LMDB itself are not seen; the lock is the backend's.
_CHANGE = ["fcntl.fcntl", "fcntl.fcntl"]
LMDB = {
    "hit": [],
    "first hit of a key": [],
    "miss": [],
    "put": _CHANGE,
    "put again": _CHANGE,
    "delete": _CHANGE,
    "usage": [],
}
#: Files looked at, at most.
STATS = {
    "hit": 0,
    "first hit of a key": 0,
    "miss": 1,
    "put": 3,
    "put again": 3,
    "delete": 5,
    "usage": 1,
    "open and close": 8,
}
KERNELS = {
    "hit in memory": [],
    "hit in memory, headers": ["stat"] * (HEADERS + 4),
    "hit in file": ["open"],
    "hit in file, headers": ["open", "open", *["stat"] * (HEADERS + 4)],
    "hit in lmdb": [],
    "hit in lmdb, headers": ["stat"] * (HEADERS + 4),
    "lookup that misses": ["open", "open"],
    "hit in a layer, file": ["open", "open"],
    "hit in a layer, lmdb": ["stat"],
}

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="locks and times of files are set by other calls there"
)


@pytest.fixture(scope="module")
def events(folder: Path, has_compiler: bool) -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(
        output(measuring("audit", folder, compiler=has_compiler), folder)
    )
    return found


def test_a_hit_from_memory_touches_no_file(events: dict[str, list[str]]) -> None:
    assert events["memory: hit"] == []


@pytest.mark.parametrize("operation", STATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends(backend: str, operation: str, events: dict[str, list[str]]) -> None:
    seen = events[f"{backend}: {operation}"]
    changes = [event for event in seen if event != "stat"]
    if "lmdb" not in backend:
        assert changes == FILE[operation]
        assert seen.count("stat") <= STATS[operation]
    elif operation in LMDB:
        assert changes == LMDB[operation]
        assert seen.count("stat") <= STATS[operation]


@pytest.mark.parametrize("name", ["key", "request"])
def test_a_key_needs_no_file(
    name: str, events: dict[str, list[str]], request: pytest.FixtureRequest
) -> None:
    if SCENARIOS[name].compiler:
        request.getfixturevalue("nvrtc")
    assert events[name] == []


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("operation", KERNELS)
def test_kernels(operation: str, events: dict[str, list[str]]) -> None:
    assert events[f"kernel: {operation}"] == KERNELS[operation]
