"""System calls: none for a hit in memory, few for the rest, and no more among many entries."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from guard.operations import HEADERS, KERNEL, MARK, fill, headers_in

import kcache

_TESTS = Path(__file__).parent.parent
#: System calls that read or write no file: for memory, threads, clocks and the process's ids.
_LEFT_OUT = re.compile(
    r"(?:m|munm|mrem)ap|mprotect|madvise|brk|futex|sched_yield|rt_sig\w+|clone3?|clock_\w+"
    r"|gettimeofday|getrandom|restart_syscall|get(?:p|t|u|eu|g|eg)id|lseek|ioctl"
)
_CALL = re.compile(r"(\d+) +(\w+)\((.*)")


def environment(home: Path) -> dict[str, str]:
    """Return variables for a child: no settings of kcache or Python, but a path to these tests."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KCACHE_", "PYTHON", "XDG_"))}
    # Without PYTHONSAFEPATH, the sources in the working directory would hide an installed package.
    return kept | {"HOME": str(home), "PYTHONPATH": str(_TESTS), "PYTHONSAFEPATH": "1"}


def code(text: str, *arguments: object) -> list[str]:
    """Return the command that runs Python code."""
    return [sys.executable, "-c", text, *map(str, arguments)]


def measuring(folder: Path, what: str) -> list[str]:
    """Return the command that measures operations in a folder; see `guard.operations`."""
    return [sys.executable, "-m", "guard.operations", str(folder), what]


def output(command: list[str], home: Path) -> str:
    """Run a command that must succeed, and return its output."""
    done = subprocess.run(
        command, env=environment(home), cwd=home, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def no_strace() -> str | None:
    """Return why system calls can't be counted here, or None if they can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    command = ["strace", "-f", "-o", os.devnull, "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"strace does not work: {done.stderr.strip()[:200]}"


def calls(command: list[str], home: Path) -> dict[str, list[str]]:
    """Run a command under strace; return the calls that its first process makes between marks.

    If an operation was run several times, the calls of the run with the fewest calls are returned.
    """
    found: dict[str, list[list[str]]] = {}
    with TemporaryDirectory() as folder:
        log = Path(folder, "calls")
        output(["strace", "-f", "-qq", "-s", "400", "-o", str(log), *command], home)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    first = lines[0].split()[0]
    current: list[str] | None = None
    for line in lines:
        match = _CALL.match(line)
        if match is None or match[1] != first or _LEFT_OUT.fullmatch(match[2]):
            continue
        if (begun := re.search(rf'"{MARK}/begin ([^"]*)"', match[3])) is not None:
            found.setdefault(begun[1], []).append(current := [])
        elif f'"{MARK}/end"' in match[3]:
            current = None
        elif current is not None:
            current.append(f"{match[2]}({match[3]}")
    return {name: min(runs, key=len) for name, runs in found.items()}


TRACED = pytest.mark.skipif(no_strace() is not None, reason=no_strace() or "")

_FEW, _MANY = 300, 4_000
#: The most calls on files for each operation. A put into files locks, checks and counts its shard
#: before and after it; LMDB begins and ends a transaction, and writes as many runs of pages as are free.
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
        # For each header, the working directory and its status, and the names of in-memory headers.
        "kernel in memory, headers": HEADERS + 5,
        "kernel in file": 6,
        # The same, and the table of mounts, which shows whether stamps last; see `_for_depth`.
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
    # A deeper tree of LMDB has more pages, and its free pages are in more places.
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
    """Return the limit for a hit with headers, which checks each part of a header's path.

    Two parts of the path are below `home`.
    """
    return MOST["kernels"]["kernel in file, headers"] + len(home.parts[1:]) + 2


# -- modules: how many an import and a hit in a fresh process load ---------------------------------

#: Code before and after the tested code. Prints the loaded modules, and whether NVRTC was loaded.
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

#: The most modules of kcache and its backends for a hit, packages included. A hit with headers also
#: checks whether the headers are unchanged, and may store their stamps.
HIT, HEADER_HIT = 41, 46
#: How many more modules each backend may load.
MORE = {"file": 0, "zstd": 1, "lmdb": 3, "zstd+lmdb": 4}
#: The packages of others that each backend loads.
PACKAGES = {
    "file": {"xxhash"},
    "zstd": {"xxhash", "zstandard"},
    "lmdb": {"xxhash", "lmdb"},
    "zstd+lmdb": {"xxhash", "lmdb", "zstandard"},
}
#: Modules of the standard library that take some milliseconds to import.
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
@pytest.mark.parametrize("backend", PACKAGES)
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
    assert found.packages == PACKAGES[backend]  # no CUDA package, no platformdirs
    assert not found.heavy or backend.startswith("zstd")  # the package zstandard imports some
