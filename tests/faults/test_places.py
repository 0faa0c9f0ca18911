"""What happens to a cache's place: rights, limits, mounts, removal, another clock, damage."""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from core.helpers import fork, key, path_of, wait
from faults.places import (
    NAMES,
    is_whole,
    leftovers,
    mount,
    sealed,
    truth,
)

from kcache import CacheEngine, KcacheError, KernelCache, open_engine
from kcache.backend import open_backend

ALL = pytest.mark.parametrize("name", NAMES)


def become_nobody() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


def in_child(work: Callable[[], object]) -> None:
    assert wait(fork(work)) == 0


def put_some(engine: CacheEngine, version: int = 1, count: int = 10) -> None:
    for number in range(count):
        assert engine.put(key(number), sealed(number, version, 3000))


def has_all(engine: CacheEngine, count: int = 10) -> None:
    for number in range(count):
        found = engine.get(key(number))
        assert found is not None
        assert is_whole(number, found)


def agrees(engine: CacheEngine, place: Path, name: str) -> None:
    sizes = truth(place, name)
    assert engine.backend.usage() == (sum(sizes.values()), len(sizes))


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
                found = engine.get(key(number))
                assert found is None or is_whole(number, found)
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
    """A directory that a process without rights owns and can reach."""
    with tempfile.TemporaryDirectory(prefix="kcache-nobody-") as folder:
        os.chmod(folder, 0o755)
        place = Path(folder) / "cache"
        place.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(place, 65534, 65534)
        yield place


@ALL
@pytest.mark.parametrize("mode", [0o500, 0], ids=oct)
def test_a_directory_without_rights_is_survived_and_works_with_them(
    name: str, mode: int, nobodys: Path
) -> None:
    def child() -> None:
        become_nobody()
        with open_engine(nobodys, backend=name) as engine:
            put_some(engine)
            folders = [Path(folder) for folder, _, _ in os.walk(nobodys)]
            for folder in reversed(folders):
                folder.chmod(mode)
            for number in range(10):
                found = engine.get(key(number))
                assert found is None or is_whole(number, found)
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
                assert engine.put(key(1), sealed(1, 2, 100)) is False
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
def test_a_cache_emptied_while_it_is_open_is_a_cache_again(
    name: str, used: str, tmp_path: Path
) -> None:
    """The next program refused it: it had our files in it, and no marker."""
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


# -- damage to files -------------------------------------------------------------------------------


def test_planted_files_are_swept_or_left_alone(tmp_path: Path) -> None:
    name = "file"
    with open_engine(tmp_path, backend=name, max_size=100_000) as engine:
        put_some(engine)
        shard = path_of(tmp_path / name, key(1)).parent
        (shard / f".{key(1)[:16]}-1-2-3.tmp").write_bytes(bytes(5000))
        (shard / ".tmp").write_bytes(b"x")
        (shard / "notes.txt").write_text("somebody's")
        (shard / f".{key(2)[:16]}-dir.tmp").mkdir()
        (tmp_path / name / "zz").mkdir()
        for number in range(60):
            engine.put(key(number), sealed(number, 2, 5000))
        for _ in engine.backend.coldest():
            pass
        assert (shard / "notes.txt").read_text() == "somebody's"
        # A file with a name that kcache does not use is left alone.
        assert [path for path in leftovers(tmp_path, name) if path.is_file()] == [shard / ".tmp"]
        has_last = engine.get(key(59))
        assert has_last is not None
        agrees(engine, tmp_path, name)


# -- forks and threads -----------------------------------------------------------------------------


@ALL
def test_a_fork_with_a_batch_open_changes_what_the_parent_wrote_only(
    name: str, tmp_path: Path
) -> None:
    with open_engine(tmp_path, backend=name) as engine:
        put_some(engine)

        def use() -> None:
            for number in range(10):
                found = engine.get(key(number))
                assert found is None or is_whole(number, found)

        with engine.backend.batch():
            engine.backend.delete(key(1))
            assert wait(fork(use)) == 0
            engine.backend.put(key("raw"), b"raw")
        assert engine.backend.get(key("raw")) == b"raw"
        assert engine.get(key(1)) is None
        agrees(engine, tmp_path, name)
        assert engine.put(key(1), sealed(1, 2, 100))
