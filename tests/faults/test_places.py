"""Changes of a cache's surroundings: rights, limits, mounts, removal, forks."""

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from core.helpers import (
    FORK_DURING_USE,
    become_nobody,
    in_child,
    key,
    nobodys_directory,
    output_of,
    python,
)
from faults.places import NAMES, agrees, has, mount, put_all, sealed, truth

from kcache import CacheEngine, KcacheError, KernelCache, open_engine
from kcache.backend import open_backend

ALL = pytest.mark.parametrize("name", NAMES)


def put_some(engine: CacheEngine, version: int = 1) -> None:
    put_all(engine, range(10), version, 3000)


def has_all(engine: CacheEngine) -> None:
    assert all(has(engine, number) for number in range(10))


# -- errors of the system ----------------------------------------------------------------------------


@ALL
def test_no_descriptors_left_is_survived(name: str, tmp_path: Path) -> None:
    def child() -> None:
        with open_engine(tmp_path, backend=name) as engine:
            put_some(engine)
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            taken = max(map(int, os.listdir("/proc/self/fd")))
            spare = [os.open("/", os.O_RDONLY) for _ in range(taken)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(spare), limits[1]))
            for number in range(10):
                has(engine, number)
                engine.put(key(number), sealed(number, 2, 3000))
            with KernelCache(tmp_path / "other", backend=name) as other:
                assert other.engine.put(key(1), sealed(1, 1, 100))
                assert other.engine.get(key(1))  # from memory
            engine.trim(0)
            engine.flush()
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            put_some(engine, 3)
            has_all(engine)
            agrees(engine, tmp_path, name)

    in_child(child)


# -- rights ----------------------------------------------------------------------------------------


@pytest.fixture
def nobodys() -> Iterator[Path]:
    """A directory that belongs to the user nobody, who can also reach it."""
    with nobodys_directory() as place:
        yield place


@ALL
@pytest.mark.parametrize("mode", [0o500, 0], ids=oct)
def test_a_directory_without_rights(name: str, mode: int, nobodys: Path) -> None:
    def child() -> None:
        become_nobody()
        with open_engine(nobodys, backend=name) as engine:
            put_some(engine)
            folders = [Path(folder) for folder, _, _ in os.walk(nobodys)]
            for folder in reversed(folders):
                folder.chmod(mode)
            for number in range(10):
                has(engine, number)
                engine.put(key(number), sealed(number, 2, 3000))
            with suppress(KcacheError), open_engine(nobodys, backend=name) as other:
                other.put(key(1), sealed(1, 3, 100))
                other.get(key(1))
            for folder in folders:
                folder.chmod(0o700)
            put_some(engine, 4)
            has_all(engine)

    def count() -> None:
        become_nobody()
        with closing(open_backend(name, str(nobodys / name), max_size=1 << 30)) as backend:
            assert backend.usage() == (sum(sizes.values()), len(sizes))

    in_child(child)
    sizes = truth(nobodys, name)
    in_child(count)


@ALL
def test_a_read_only_mount_still_serves(name: str, disk: Path) -> None:
    place = disk / "cache"
    with open_engine(place, backend=name) as engine:
        put_some(engine)
    mount(disk, "--bind", str(disk))
    try:
        mount(disk, "-o", "remount,bind,ro")

        def read(read_only: bool) -> None:
            with open_engine(place, backend=name, read_only=read_only) as engine:
                has_all(engine)
                assert not engine.put(key(1), sealed(1, 2, 100))
                engine.delete(key(2))
                engine.clear()
                has_all(engine)
                assert engine.stats().corrupt == 0

        in_child(lambda: read(True))
        in_child(lambda: read(False))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    with open_engine(place, backend=name) as engine:
        put_some(engine, 2)
        has_all(engine)
        agrees(engine, place, name)


# -- removed and replaced --------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("used", ["put", "get", "get_or_create"])
def test_a_cache_that_is_emptied_while_it_is_open(name: str, used: str, tmp_path: Path) -> None:
    """Once, files were left without a marker, so the next program refused the directory."""
    place = tmp_path / "cache"
    arguments = {
        "put": (sealed(1, 2, 100),),
        "get": (),
        "get_or_create": (lambda: sealed(1, 2, 100),),
    }
    with open_engine(place, backend=name) as engine:
        put_some(engine)
        place.rename(tmp_path / "away")
        place.mkdir(0o700)
        getattr(engine, used)(key(1), *arguments[used])
    with open_engine(place, backend=name) as engine:
        put_some(engine)
        has_all(engine)


# -- forks beside imports, and children that exit --------------------------------------------------


FIRST = """
import os, signal, sys, threading, time
from kcache import KernelCache, CompileOptions, Entry
place, delay = sys.argv[1], float(sys.argv[2])
entry = Entry({"a": b"x" * 100})
def use(number):
    with KernelCache(place) as cache:
        for n in range(3):
            key = f"{number:02x}{n:062x}"
            assert cache.engine.get_or_create(key, lambda: entry) == entry
            cache.engine.delete(key)
            cache.lookup(f"#include <x.h>\\n// {n}", (), CompileOptions(arch="sm_80"))
        cache.total_stats()
        cache.print_info(open(os.devnull, "w"))
thread = threading.Thread(target=use, args=(0,))
thread.start()
time.sleep(delay)
children = []
for number in range(1, 6):
    pid = os.fork()
    if not pid:
        signal.alarm(30)
        use(number)
        os._exit(0)
    children.append(pid)
for pid in children:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
thread.join()
print("well")
"""


def test_forks_beside_the_first_use_leave_no_child_waiting(tmp_path: Path, long: bool) -> None:
    """Of 80 children that were forked up to 120 ms after the first use, 7 once waited for ever."""
    runs = 80 if long else 3
    for run in range(runs):
        assert output_of(FIRST, str(tmp_path / "cache"), str(0.12 * run / runs)) == "well"


BESIDE = (
    """
import os, signal, sys, threading, time
import kcache
module, use, place = sys.argv[1:]
begun = threading.Event()
class Slow:
    def find_spec(name, path=None, target=None):
        if name == module and not begun.is_set():
            begun.set()
            time.sleep(0.3)
sys.meta_path.insert(0, Slow)
"""
    + FORK_DURING_USE
)
IMPORTS = [
    ("kcache.util.forks", "kcache.Backend"),
    ("importlib.metadata", "kcache.Backend; kcache.backend.backend_names()"),
    ("kcache_backends.file", "kcache.open_engine(place, backend='zstd').close()"),
    ("kcache_backends.lmdb", "kcache.open_engine(place, backend='zstd+lmdb').close()"),
]


@pytest.mark.parametrize(("module", "use"), IMPORTS)
def test_a_fork_beside_an_import_leaves_no_child_waiting(
    module: str, use: str, tmp_path: Path
) -> None:
    """A fork does not run the hooks of a module that is imported while the fork waits."""
    done = python(BESIDE, module, use, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
