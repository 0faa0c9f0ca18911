"""System calls: none for a hit from memory, few for the rest, no more among many entries."""

import json
import sys
from pathlib import Path

import pytest
from guard.child import calls, code, measuring, no_strace, output
from guard.operations import HEADERS, KERNEL, fill, headers_in

import kcache

TRACED = pytest.mark.skipif(no_strace() is not None, reason=no_strace() or "")

_FEW, _MANY = 300, 4_000
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


@TRACED
@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_few_calls_and_no_more_among_many_entries(backend: str, tmp_path: Path) -> None:
    counts = []
    for number in (_FEW, _MANY):
        home = tmp_path.resolve() / str(number)
        home.mkdir()
        fill(home / "cache", backend, number)
        made = calls(measuring(home / "cache", backend), home)
        counts.append({name: len(each) for name, each in made.items()})
    few, many = counts
    assert list(few) == list(many) == list(MOST[backend])
    assert {name: n for name, n in few.items() if n > MOST[backend][name]} == {}
    # A deeper tree of LMDB has more pages, and free ones in more places.
    more = 0 if backend == "file" else 6
    assert {name: (few[name], n) for name, n in many.items() if n > few[name] + more} == {}


@TRACED
@pytest.mark.usefixtures("nvrtc")
def test_few_calls_for_kernels(tmp_path: Path) -> None:
    made = calls(measuring(tmp_path, "kernels"), tmp_path)
    assert set(made) == set(MOST["kernels"])
    most = MOST["kernels"] | {"kernel in file, headers": _for_depth(tmp_path)}
    assert {n: each for n, each in made.items() if len(each) > most[n]} == {}


def _for_depth(home: Path) -> int:
    """To find a header's mount, each part of its path is looked at; two parts are below `home`."""
    return MOST["kernels"]["kernel in file, headers"] + len(home.parts[1:]) + 2


# -- modules: how many an import and a hit in a fresh process load ---------------------------------

#: Goes before the code, and behind it; prints what that loaded, and the libraries mapped then.
BEFORE = "import sys\nbefore = set(sys.modules)\n"
AFTER = """
loaded = sorted(set(sys.modules) - before)
import json
print(json.dumps(loaded))
try:
    with open("/proc/self/maps") as maps:
        print("libnvrtc" in maps.read())
except FileNotFoundError:  # not Linux
    print(False)
"""

#: Modules of kcache and its backends, packages and `kcache` itself included. A hit with headers also
#: checks whether they are unchanged, and may put a note about them.
ENGINE_GET, HIT, HEADER_HIT = 26, 41, 46
#: ... and so many more with another backend than `file`.
MORE = {"file": 0, "zstd": 1, "lmdb": 3, "zstd+lmdb": 4}
#: Packages of others.
PACKAGES = {
    "file": {"xxhash"},
    "zstd": {"xxhash", "zstandard"},
    "lmdb": {"xxhash", "lmdb"},
    "zstd+lmdb": {"xxhash", "lmdb", "zstandard"},
}
#: Of the standard library: each costs a start of some milliseconds.
HEAVY = {
    *("asyncio", "concurrent", "ctypes", "dataclasses", "email", "hashlib", "http", "inspect"),
    *("logging", "multiprocessing", "platform", "random", "socket", "sqlite3", "ssl"),
    *("subprocess", "tempfile", "urllib"),
}


class Loaded:
    """The modules that a process has loaded beyond those of a bare interpreter."""

    def __init__(self, said: str) -> None:
        self.names = set(json.loads(said))
        self.ours = sum(name.startswith("kcache") for name in self.names)
        tops = {name.partition(".")[0] for name in self.names} - {"kcache", "kcache_backends"}
        self.packages = tops - set(sys.stdlib_module_names)
        self.heavy = tops & HEAVY


def loaded(text: str, home: Path, *arguments: object) -> Loaded:
    names, mapped = output(code(BEFORE + text + AFTER, *arguments), home).splitlines()
    assert mapped == "False"
    return Loaded(names)


def test_importing_kcache_loads_nothing_else(tmp_path: Path) -> None:
    found = loaded("import kcache", tmp_path)
    assert found.names <= {"kcache", "__future__"}
    assert "kcache" in found.names


ENGINE = """
import kcache
with kcache.open_engine(sys.argv[1], backend=sys.argv[2]) as engine:
    assert engine.get("0" * 64).payload
"""


@pytest.mark.parametrize("backend", PACKAGES)
def test_a_hit_of_the_engine(backend: str, tmp_path: Path) -> None:
    place = tmp_path / "cache"
    with kcache.open_engine(place, backend=backend) as engine:
        assert engine.put("0" * 64, kcache.Entry({"a": b"x"}))
    found = loaded(ENGINE, tmp_path, place, backend)
    assert found.ours <= ENGINE_GET + MORE[backend]
    assert found.packages == PACKAGES[backend]
    assert not found.heavy or backend.startswith("zstd")  # the binding of Zstandard loads some


ASK = """
import os
import kcache
place, source, backend = sys.argv[1:]
options = kcache.CompileOptions(arch="sm_80", include_paths=[os.path.abspath("inc")])
with kcache.KernelCache(place, backend=backend) as cache:
    kernel = cache.get_or_compile(source, (), options)
assert kernel.cached
"""


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("headers", [False, True])
@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_hit_of_a_new_process(
    backend: str, headers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = headers_in(tmp_path / "inc") if headers else KERNEL.format(7)
    options = kcache.CompileOptions(arch="sm_80", include_paths=[tmp_path / "inc"])
    place = tmp_path / "cache"
    with kcache.KernelCache(place, backend=backend) as cache:
        cache.get_or_compile(source, (), options)
    found = loaded(ASK, tmp_path, place, source, backend)
    assert found.ours <= (HEADER_HIT if headers else HIT) + MORE[backend]
    assert found.packages == PACKAGES[backend]  # no CUDA, no directories of the platform's
    assert not found.heavy
