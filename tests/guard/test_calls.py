"""System calls: each one of a hit, a miss, a put, a delete, of opening and of a process's hit.

A call that is added fails here, and so does one that is saved: then the list has to be shortened.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest
from guard.calls import Call, between_marks, no_strace, places, traced
from guard.child import code, measuring, output
from guard.scenarios import BACKENDS, HEADERS, KERNEL, SCENARIOS, headers_in

pytestmark = pytest.mark.skipif(no_strace() is not None, reason=no_strace() or "")

_READ_ENTRY = "open ENTRY, fstat ENTRY, read ENTRY, close ENTRY"
_WRITE_ENTRY = """
    stat counters, read counters,
    lock counters, fstat counters, read counters, readlink SHARD, stat ENTRY, write counters,
    open TEMPORARY, write TEMPORARY, utime TEMPORARY, close TEMPORARY, rename TEMPORARY,
    write counters, unlock counters, fstat counters
"""
#: The file says that it is ours, and, before it is closed, the number that it is this file's still.
_OPEN_COUNTERS = "open counters, fstat counters, read counters"
#: In the backend's directory. zstd compresses in memory and makes the same calls.
FILE = {
    "hit": _READ_ENTRY,
    "first hit of a key": "open ENTRY, fstat ENTRY, read ENTRY, utime ENTRY, close ENTRY",
    "miss": "open ENTRY",
    "put": _WRITE_ENTRY,
    "put again": _WRITE_ENTRY,
    "delete": """
        lock counters, fstat counters, read counters, stat ENTRY, readlink SHARD, write counters, unlink ENTRY,
        write counters,
        unlock counters
    """,
    "usage": "stat counters, read counters",
    "open and close": f"{_OPEN_COUNTERS}, fstat counters, close counters",
}
#: LMDB writes as many runs of pages as the free ones lie in, so several writes in a row are one.
_TRANSACTION = """
    stat db/data.mdb, fstat lock, stat lock, lock lock, stat db/data.mdb,
    fstat db/lock.mdb, fstat db/data.mdb,
    write db/data.mdb, fdatasync db/data.mdb, write db/data.mdb, unlock lock
"""
LMDB = {
    "hit": "",
    "first hit of a key": "",
    "miss": "stat db/data.mdb",
    "put": _TRANSACTION,
    "put again": _TRANSACTION,
    "delete": f"{_TRANSACTION}, stat db/data.mdb",
    "usage": "stat db/data.mdb",
}
#: A bound for LMDB's own calls when it is opened. With version 1.8.1 of the binding there were 48
#: calls, and these files were opened.
_LMDB_OPEN = 55
_LMDB_FILES = [
    *("lock", "lock", "db"),  # for the mark, and to be locked
    *("db/lock.mdb", "db/data.mdb", "db/lock.mdb", "db/data.mdb", "db/data.mdb"),
]

_HEADERS = ", ".join(f"stat inc/h{number}.h" for number in range(HEADERS))
_FILE_ENTRY = _READ_ENTRY.replace("ENTRY", "cache/file/ENTRY")
#: Names of texts in memory, which must not be other names of headers.
_NAMES = "stat ./__nv_name_map, stat ./__nv_nvrtc_builtin_header.h, stat ./kernel.cu"
#: In the folder that holds the cache and the headers; `.` is the working directory.
KERNELS = {
    "hit in memory": "",
    # The working directory: relative includes are looked for in it.
    "hit in memory, headers": f"getcwd ., {_HEADERS}, stat ., {_NAMES}",
    # Without a memory tier, each request is made again, which begins with the working directory.
    "hit in file": f"getcwd ., {_FILE_ENTRY}",
    "hit in file, headers": f"getcwd ., {_FILE_ENTRY}, {_HEADERS}, stat ., {_NAMES}, {_FILE_ENTRY}",
    "hit in lmdb": "getcwd .",
    "hit in lmdb, headers": f"getcwd ., {_HEADERS}, stat ., {_NAMES}",
    # The second is under the key that has the name of the source in it.
    "lookup that misses": "getcwd ., open cache/file/ENTRY, open cache/file/ENTRY",
    "open and close": """
        stat cache, stat cache,
        open cache/kcache.json, fstat cache/kcache.json, read cache/kcache.json,
        fstat cache/kcache.json, close cache/kcache.json,
        stat cache/settings.json,
        stat cache/file, stat cache/file, stat cache/file,
        open cache/file/counters, fstat cache/file/counters, read cache/file/counters,
        fstat cache/file/counters, close cache/file/counters
    """,
    "hit in a layer, file": (
        f"getcwd ., open cache/file/ENTRY, {_READ_ENTRY.replace('ENTRY', 'layer/file/ENTRY')}"
    ),
    "hit in a layer, lmdb": "getcwd ., stat cache/lmdb/db/data.mdb",
}


@pytest.fixture(scope="module")
def calls(folder: Path, has_compiler: bool) -> dict[str, list[Call]]:
    return between_marks(traced(measuring("calls", folder, compiler=has_compiler), folder))


def said(text: str) -> list[str]:
    return [each for part in text.split(",") if (each := " ".join(part.split()))]


def place_of(name: str, folder: Path) -> Path:
    return folder / str(list(SCENARIOS).index(name))


def within(calls: list[Call], place: Path) -> list[Call]:
    return [call for call in calls if call.path.startswith(f"{place}/")]


def test_a_hit_from_memory_makes_no_call(calls: dict[str, list[Call]]) -> None:
    assert calls["memory: hit"] == []


@pytest.mark.parametrize("operation", FILE)
@pytest.mark.parametrize("backend", ["file", "zstd"])
def test_files(backend: str, operation: str, calls: dict[str, list[Call]], folder: Path) -> None:
    name = f"{backend}: {operation}"
    place = place_of(name, folder) / backend
    made = calls[name]
    if operation == "open and close":  # files outside are checked through `directory`
        assert len(made) - len(within(made, place)) == 9
        made = within(made, place)
    assert places(made, place) == said(FILE[operation])


@pytest.mark.parametrize("operation", LMDB)
@pytest.mark.parametrize("backend", ["lmdb", "zstd+lmdb"])
def test_lmdb(backend: str, operation: str, calls: dict[str, list[Call]], folder: Path) -> None:
    name = f"{backend}: {operation}"
    found = places(calls[name], place_of(name, folder) / backend)
    assert [each for each, _ in groupby(found)] == said(LMDB[operation])
    assert len(found) <= len(said(LMDB[operation])) + 4


@pytest.mark.parametrize("backend", ["lmdb", "zstd+lmdb"])
def test_opening_lmdb(backend: str, calls: dict[str, list[Call]], folder: Path) -> None:
    name = f"{backend}: open and close"
    place = place_of(name, folder) / backend
    inside = within(calls[name], place)
    assert len(inside) <= _LMDB_OPEN
    opened = places([call for call in inside if call.what == "open"], place)
    assert opened == [f"open {file}" for file in _LMDB_FILES]


@pytest.mark.parametrize("name", ["key", "request"])
def test_a_key_is_made_without_looking_at_files(
    name: str, calls: dict[str, list[Call]], request: pytest.FixtureRequest
) -> None:
    if SCENARIOS[name].compiler:
        request.getfixturevalue("nvrtc")
    assert [call.what for call in calls[name]] == ["getcwd"] * (name == "request")


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("operation", KERNELS)
def test_kernels(operation: str, calls: dict[str, list[Call]], folder: Path) -> None:
    name = f"kernel: {operation}"
    place = place_of(name, folder)
    found = [
        each.replace(f" {place}", " ..").replace(f" {folder}", " .")
        for each in places(calls[name], place)
    ]
    assert found == said(KERNELS[operation])


def test_every_scenario_is_asserted(calls: dict[str, list[Call]]) -> None:
    asserted = {"memory: hit", "key", "request"}
    asserted |= {f"{each}: {what}" for each in ("file", "zstd") for what in FILE}
    asserted |= {f"{each}: {what}" for each in ("lmdb", "zstd+lmdb") for what in LMDB}
    asserted |= {f"{each}: open and close" for each in BACKENDS}
    asserted |= {f"kernel: {what}" for what in KERNELS}
    assert asserted == set(SCENARIOS)


# -- bytes -----------------------------------------------------------------------------------------


def test_a_put_writes_the_envelope_once_and_two_counters(
    calls: dict[str, list[Call]], folder: Path
) -> None:
    made = [call for call in calls["file: put"] if call.what == "write"]
    (stored,) = {
        entry.stat().st_size for entry in place_of("file: put", folder).rglob("0" * 2 + "?" * 62)
    }
    assert [call.result for call in made] == [32, stored, 32]


def test_a_hit_reads_each_byte_once(calls: dict[str, list[Call]], folder: Path) -> None:
    (entry,) = place_of("file: hit", folder).glob("file/??/" + "?" * 64)
    (read,) = (call for call in calls["file: hit"] if call.what == "read")
    assert read.result == entry.stat().st_size


# -- a process of its own --------------------------------------------------------------------------

_ASK = """
import sys, kcache
from guard.scenarios import trust_files_at_once
trust_files_at_once()
place, backend, source = sys.argv[1:]
options = kcache.CompileOptions(arch="sm_80", include_paths=["inc"])
with kcache.KernelCache(place, backend=backend) as cache:
    print(cache.get_or_compile(source, (), options).cached)
"""
_STATISTICS = ["stats", "history"]
#: Files that a hit of a new process opens, in order.
_OPENED = {
    ("file", False): ["kcache.json", "file/counters", "file/ENTRY", *_STATISTICS],
    ("file", True): ["kcache.json", "file/counters", "file/ENTRY", "file/ENTRY", *_STATISTICS],
    # At its end it writes down the use.
    ("lmdb", False): [
        "kcache.json",
        "lmdb",
        *(f"lmdb/{file}" for file in _LMDB_FILES),
        *_STATISTICS,
    ],
    ("lmdb", True): [
        "kcache.json",
        "lmdb",
        *(f"lmdb/{file}" for file in _LMDB_FILES),
        *_STATISTICS,
    ],
}
#: Calls in the cache's directory by such a process, its statistics included, rounded up: 34, 39, 94
#: and 95 were counted, of which nine see whether LMDB's descriptors are still its own.
_MOST = {("file", False): 37, ("file", True): 42, ("lmdb", False): 99, ("lmdb", True): 99}


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(("backend", "headers"), _OPENED)
def test_a_hit_of_a_new_process(backend: str, headers: bool, tmp_path: Path) -> None:
    home = tmp_path.resolve()
    source = headers_in(home / "inc") if headers else KERNEL.format(7)
    command = code(_ASK, home / "cache", backend, source)
    assert output(command, home) == "False\n"
    assert output(command, home) == "True\n"
    calls = traced(command, home)
    inside = within(calls, home / "cache")
    opened = [call for call in inside if call.what == "open"]
    expected = [f"open {file}" for file in _OPENED[backend, headers]]
    assert places(opened, home / "cache") == expected
    assert len(inside) <= _MOST[backend, headers]
    stats = [call for call in calls if call.path.startswith(f"{home}/inc/")]
    assert [call.what for call in stats] == ["stat"] * (HEADERS * headers)


# -- the number of entries -------------------------------------------------------------------------

_FEW, _MANY = 300, 10_000

#: Files are written straight to where the backend keeps them, which is faster; without its
#: counters, it finds out by itself what is there.
_FILL = """
import os, sys, kcache
from guard.scenarios import entry, key
from kcache.entry import encode
place, backend, count = sys.argv[1:]
def opened():
    return kcache.open_engine(place, backend=backend, max_size=1 << 30)
with opened() as engine, engine.backend.batch():
    for number in range(256 if backend == "file" else int(count)):
        assert engine.put(f"{number % 256:02x}" + key(number)[2:], entry(64))
if backend == "file":
    os.unlink(f"{place}/file/counters")
    for name in map(key, range(256, int(count))):
        with open(f"{place}/file/{name[:2]}/{name}", "wb", buffering=0) as file:
            file.write(encode(name, entry(64)))
with opened() as engine:
    assert engine.entry_count == int(count), engine.entry_count
"""
_SCALE = """
import gc, itertools, sys
from guard.measure import calls
from guard.scenarios import entry, key, still
import kcache
place, backend = sys.argv[1:]
def opened():
    return kcache.open_engine(place, backend=backend, max_size=1 << 30)
def open_and_close():
    with opened():
        pass
def shard(number):  # it is there after the first put
    return "00" + key(number)[2:]
gc.disable()
open_and_close()
calls(open_and_close, "open")
with opened() as engine:
    still(engine)
    here = [info.key for info in itertools.islice(engine.backend.scan(), 20)]
    used, gone, new = iter(here[:10]), iter(here[10:]), itertools.count()
    operations = {
        "usage": lambda: engine.size_bytes,
        "get": lambda: engine.get(next(used)),
        "miss": lambda: engine.get(key("missing")),
        "put": lambda: engine.put(shard(next(new)), entry(64)),
        "put again": lambda: engine.put(here[0], entry(64)),
        "delete": lambda: engine.delete(next(gone)),
    }
    for name, operation in operations.items():
        for _ in range(3):
            operation()
        calls(operation, name)
"""


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_no_operation_makes_more_calls_among_many_entries(backend: str, tmp_path: Path) -> None:
    counts = []
    for number in (_FEW, _MANY):
        home = (tmp_path / str(number)).resolve()
        home.mkdir()
        output(code(_FILL, home / "cache", backend, number), home)
        made = between_marks(traced(code(_SCALE, home / "cache", backend), home))
        counts.append({name: len(within(calls, home)) for name, calls in made.items()})
    few, many = counts
    assert list(few) == list(many) == ["open", "usage", "get", "miss", "put", "put again", "delete"]
    if backend == "file":
        assert many == few
    else:  # a deeper tree has more pages, and free ones in more places
        assert all(few[name] <= many[name] + 2 and many[name] <= few[name] + 6 for name in few)
