"""Modules: what an import, a hit in a fresh process and a wait load, by name; each costs a start.

Nothing of kcache may be loaded beyond the lists. Of the standard library nothing heavy may be
loaded; Python's versions differ in what one of its modules takes along.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from guard.child import code, output
from guard.operations import KERNEL, headers_in
from guard.waiting import MISSING, waiter

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

CORE = {
    *("backend", "config", "directory", "entry", "errors"),
    *("engine", "engine.engine", "engine.eviction", "engine.journal"),
    "engine.opening",
    *("engine.stats", "util", "util.forks", "util.locks", "util.log", "util.memory_tier"),
    *("util.open_file", "util.record", "util.safe_path", "util.units"),
}
HIT = CORE | {
    *("kernel_cache", "kernels", "kernels.compiled_kernel", "kernels.find"),
    *("kernels.request_factory", "nvrtc", "nvrtc.key", "nvrtc.library", "nvrtc.options"),
    *(
        "nvrtc.parsed_options",
        "nvrtc.request",
        "nvrtc.search",
        "nvrtc.workers",
        "nvrtc.workers.harmless",
    ),
}
#: To check whether the headers are unchanged.
HEADER_HIT = HIT | {"nvrtc.answers", "nvrtc.files", "nvrtc.headers", "nvrtc.manifest"}
WAIT = {
    *("engine.circles", "engine.key_locks", "engine.single_flight", "kernels.resolver"),
    *("kernels.wiring", "nvrtc.workers.texts"),
}
_FILE = {"_coldest", "_examine", "_file_check", "_files", "_shards", "file"}
_LMDB = {"_files", "_lmdb_environment", "_lmdb_files", "_lmdb_records", "lmdb"}
BACKENDS = {"file": _FILE, "zstd": _FILE | {"zstd"}, "lmdb": _LMDB, "zstd+lmdb": _LMDB | {"zstd"}}
#: Modules of kcache that a backend needs beside the engine's.
MORE = {"lmdb": {"util.mounts"}, "zstd+lmdb": {"util.mounts"}}
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
        self.kcache = self._below("kcache")
        self.backends = self._below("kcache_backends")
        tops = {name.partition(".")[0] for name in self.names} - {"kcache", "kcache_backends"}
        self.packages = tops - set(sys.stdlib_module_names)
        self.heavy = tops & HEAVY

    def _below(self, package: str) -> set[str]:
        start = f"{package}."
        return {name.removeprefix(start) for name in self.names if name.startswith(start)}


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hit_of_the_engine(backend: str, tmp_path: Path) -> None:
    put = 'engine.put("0" * 64, kcache.Entry({"a": b"x"}))'
    get = 'assert engine.get("0" * 64).payload'
    place = tmp_path / "cache"
    output(code("import sys" + ENGINE.format(put), place, backend), tmp_path)
    found = loaded(ENGINE.format(get), tmp_path, place, backend)
    assert found.kcache <= CORE | MORE.get(backend, set())
    assert found.backends <= BACKENDS[backend]
    assert found.packages == PACKAGES[backend]
    assert not found.heavy or backend.startswith("zstd")  # the binding of Zstandard loads some


def test_a_put_loads_what_a_hit_does(tmp_path: Path) -> None:
    put = 'assert engine.put("0" * 64, kcache.Entry({"a": b"x"}))'
    found = loaded(ENGINE.format(put), tmp_path, tmp_path / "cache", "file")
    assert found.kcache <= CORE
    assert not found.heavy


ASK = f"{MISSING}\nassert ask(*sys.argv[1:]).cached\n"


def source_in(home: Path, *, headers: bool) -> str:
    return headers_in(home / "inc") if headers else KERNEL.format(7)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("headers", [False, True])
@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_hit_of_a_new_process(backend: str, headers: bool, tmp_path: Path) -> None:
    source = source_in(tmp_path, headers=headers)
    place = tmp_path / "cache"
    output(code(f"import sys{MISSING}ask(*sys.argv[1:])", place, source, backend), tmp_path)
    found = loaded(ASK, tmp_path, place, source, backend)
    assert found.kcache <= (HEADER_HIT if headers else HIT) | MORE.get(backend, set())
    assert found.backends <= BACKENDS[backend]
    assert found.packages == PACKAGES[backend]  # no CUDA, no directories of the platform's
    assert not found.heavy


@pytest.mark.usefixtures("nvrtc")
def test_a_lookup_that_misses(tmp_path: Path) -> None:
    text = """
import kcache
with kcache.KernelCache(sys.argv[1]) as cache:
    assert cache.lookup(sys.argv[2], (), kcache.CompileOptions(arch="sm_80")) is None
"""
    found = loaded(text, tmp_path, tmp_path / "cache", KERNEL.format(7))
    assert found.kcache <= HIT
    assert found.packages == {"xxhash"}


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("headers", [False, True])
def test_who_waits_loads_the_locks_and_nothing_to_compile_with(
    headers: bool, tmp_path: Path
) -> None:
    said = waiter(BEFORE + ASK + AFTER, tmp_path, source_in(tmp_path, headers=headers))
    assert said[-1] == "False"  # no libnvrtc
    found = Loaded(said[-2])
    assert found.kcache <= (HEADER_HIT if headers else HIT) | WAIT
    assert found.packages == {"xxhash"}
    assert not found.heavy
