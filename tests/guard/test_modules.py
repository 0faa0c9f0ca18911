"""Modules: how many an import and a hit in a fresh process load; each costs a start.

Of the standard library nothing heavy may be loaded, and of other packages only those that are
named.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from guard.child import code, output
from guard.operations import KERNEL, headers_in

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
ENGINE_GET, HIT, HEADER_HIT = 21, 33, 39
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
    {}
"""


@pytest.mark.parametrize("backend", PACKAGES)
def test_a_hit_of_the_engine(backend: str, tmp_path: Path) -> None:
    put = 'engine.put("0" * 64, kcache.Entry({"a": b"x"}))'
    get = 'assert engine.get("0" * 64).payload'
    place = tmp_path / "cache"
    output(code("import sys" + ENGINE.format(put), place, backend), tmp_path)
    found = loaded(ENGINE.format(get), tmp_path, place, backend)
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
"""


def source_in(home: Path, *, headers: bool) -> str:
    return headers_in(home / "inc") if headers else KERNEL.format(7)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("headers", [False, True])
@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_hit_of_a_new_process(backend: str, headers: bool, tmp_path: Path) -> None:
    source = source_in(tmp_path, headers=headers)
    place = tmp_path / "cache"
    output(code("import sys" + ASK, place, source, backend), tmp_path)
    found = loaded(ASK + "assert kernel.cached", tmp_path, place, source, backend)
    assert found.ours <= (HEADER_HIT if headers else HIT) + MORE[backend]
    assert found.packages == PACKAGES[backend]  # no CUDA, no directories of the platform's
    assert not found.heavy
