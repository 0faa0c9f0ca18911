"""LmdbBackend beyond the contract: recorded uses, freed space, refusals, and files of others."""

import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from core.helpers import entry, key, stored_size
from faults.places import stopped

from kcache import BackendError, ConfigError, KernelCache, open_engine
from kcache.directory import open_directory
from kcache.entry import encode
from kcache.util.mounts import FileSystem, file_system
from kcache_backends.file import FileBackend
from kcache_backends.lmdb import LmdbBackend

PAGE = 4096
DAY = 86_400 * 10**9


def test_a_cleared_cache_gives_its_space_back(tmp_path: Path) -> None:
    data = tmp_path / "lmdb" / "db" / "data.mdb"
    with open_engine(tmp_path, backend="lmdb", max_size=10_000_000) as engine:
        for number in range(50):
            assert engine.put(key(number), entry(60_000, number))

        def other(stop: Callable[[], None]) -> None:
            """Use the new database, although this process has the replaced one open."""
            engine.get(key(1))
            stop()
            assert engine.get(key(49)) is None
            assert engine.get(key("new")) == entry()
            assert engine.put(key("more"), entry())

        with stopped(other):
            assert data.stat().st_size > 3_000_000
            engine.clear()
            assert engine.put(key("new"), entry())
        assert data.stat().st_size < 100_000
        assert engine.entry_count == 2
    assert {path.name for path in (tmp_path / "lmdb").iterdir()} == {"db", "lock"}


NETWORK = """\
20 1 8:1 / / rw - ext4 /dev/sda1 rw
30 20 0:40 / /home/shared\\040files rw,relatime shared:7 - {kind} server:/export rw
40 30 0:41 / /home/shared\\040files/scratch rw - xfs /dev/sdb1 rw
"""


@pytest.mark.parametrize(
    ("kind", "shared"), [("nfs4", True), ("fuse.sshfs", True), ("fuse.mergerfs", False)]
)
def test_network_file_systems_are_refused(kind: str, shared: bool, tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(NETWORK.format(kind=kind))

    def found(path: str) -> FileSystem:
        return file_system("/home/shared files/cache", mounts=str(table))

    assert found("") == FileSystem(kind, "/home/shared files", "server:/export")
    if shared:
        with pytest.raises(BackendError, match=rf"network file system \({kind} at /home/shared"):
            LmdbBackend(tmp_path / "cache", file_system=found)
        assert not (tmp_path / "cache").exists()
    else:
        LmdbBackend(tmp_path / "cache", file_system=found).close()


def test_foreign_files_beside_the_database_are_never_removed(tmp_path: Path) -> None:
    place = tmp_path / "lmdb"
    kept = [place / "notes.txt", place / "old/mine", place / "db/mine"]
    with closing(LmdbBackend(place, max_size=4 << 20)) as backend:
        for number in range(60):
            backend.put(key(number), os.urandom(60_000))
        for path in kept[:2]:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            path.write_text("mine")
        for number in range(60):
            backend.delete(key(number))
        backend.put(key(1), b"1")
    (place / "db" / "mine").write_text("mine")
    os.truncate(place / "db" / "data.mdb", 100)
    with closing(LmdbBackend(place, max_size=4 << 20)) as backend:
        with pytest.raises(BackendError, match="move it away"):
            backend.put(key(1), b"1")
        assert all(path.exists() for path in kept)
        (place / "db" / "mine").unlink()
        with pytest.raises(BackendError, match="not empty"):
            backend.put(key(1), b"1")
        (place / "old" / "mine").unlink()
        backend.put(key(1), b"1")
        assert backend.get(key(1)) == b"1"
    assert kept[0].exists()


def test_a_use_that_is_only_noted_saves_an_entry_from_a_trim_by_age(tmp_path: Path) -> None:
    open_directory(str(tmp_path))
    old = LmdbBackend(tmp_path / "lmdb", clock=lambda: time.time_ns() - 40 * DAY)
    for number in range(2):
        old.put(key(number), encode(key(number), entry()))
    old.close()
    with open_engine(tmp_path, backend="lmdb") as engine:
        assert engine.get(key(0)) == entry()
        assert engine.trim(older_than=30 * 86_400) == PAGE
        assert engine.get(key(0)) == entry()
        assert engine.get(key(1)) is None


@pytest.mark.parametrize("name", ["file", "lmdb"])
def test_entries_from_the_future_are_evicted_first(name: str, tmp_path: Path) -> None:
    open_directory(str(tmp_path))
    factory = {"file": FileBackend, "lmdb": LmdbBackend}[name]
    wrong = factory(tmp_path / name, clock=lambda: time.time_ns() + 3650 * DAY)
    for number in range(8):
        wrong.put(key(number), encode(key(number), entry()))
    wrong.close()
    size = PAGE if name == "lmdb" else stored_size()
    with open_engine(tmp_path, backend=name, max_size=10 * size + 5000) as engine:
        for number in range(100, 108):
            assert engine.put(key(number), entry())
        for number in range(100, 108):
            assert engine.get(key(number)) == entry()


@pytest.mark.parametrize("given", [17 << 40, "17TiB"])
@pytest.mark.parametrize("name", ["lmdb", "zstd+lmdb"])
def test_caps_that_lmdb_refuses(name: str, given: int | str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^max_size: expected .* with LMDB.*, got {17 << 40};"):
        KernelCache(tmp_path / "cache", backend=name, max_size=given)
