"""The directory of the LMDB backend: nothing that is not ours is changed, or trusted."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import lmdb
import pytest
from core.helpers import entry, fork, key, wait

from kcache import BackendError, open_engine
from kcache.directory import open_directory
from kcache_backends.lmdb import LARGEST_CAP, LmdbBackend

Snapshot = dict[str, tuple[int, int, int, object]]


def snapshot(place: Path) -> Snapshot:
    """Returns kind, mode, time and content of all that is below a directory."""
    found: Snapshot = {}
    for folder, folders, files in os.walk(place):
        for name in (".", *folders, *files):
            path = Path(folder, name)
            status = path.lstat()
            content: object = None
            if stat.S_ISREG(status.st_mode):
                content = path.read_bytes()
            elif stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            elif stat.S_ISDIR(status.st_mode):
                content = sorted(os.listdir(path))
            found[str(path)] = (status.st_mode, status.st_mtime_ns, status.st_ino, content)
    return found


def other_lmdb(place: Path, records: int = 5) -> None:
    """Makes a database of another program, in a process of its own."""

    def work() -> None:
        place.mkdir(parents=True, mode=0o700)
        with lmdb.open(str(place), lib_version=0) as env, env.begin(write=True) as txn:
            for number in range(records):
                txn.put(b"word %d" % number, b"meaning")

    assert wait(fork(work)) == 0


def names(*paths: str) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        for path in paths:
            (place / path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            (place / path).write_text(f"somebody's {path}")

    return make


def linked(place: Path) -> None:
    other_lmdb(place.parent / "elsewhere")
    place.mkdir(mode=0o700)
    (place / "db").symlink_to(place.parent / "elsewhere")


FOREIGN: dict[str, Callable[[Path], None]] = {
    "an LMDB database": other_lmdb,
    "one in db": lambda place: other_lmdb(place / "db"),
    "one in db, with a lock": lambda place: (other_lmdb(place / "db"), names("lock")(place))[0],
    "new and old": names("new/a/b/c", "old/photo.jpg"),
    "new and old, and databases": names("new/data.mdb", "old/data.mdb"),
    "a lock": names("lock"),
    "a checkout": names(".git/HEAD", "db/migrations/1.sql", "new/index.html"),
    "a home": names(".profile", "db", "old"),
    "a file called db": names("db"),
    "a table of readers": names("db/lock.mdb"),
    "a data file of another kind": names("db/data.mdb"),
    "a link to a database": linked,
}


def use_all(place: Path) -> None:
    for read_only in (False, True):
        with closing(LmdbBackend(place, read_only=read_only)) as backend:
            with pytest.raises(BackendError):
                backend.put(key(1), b"1")
            with pytest.raises(BackendError):
                backend.delete(key(1))
            for ask in (backend.scan, backend.coldest, backend.check):
                with suppress(BackendError):
                    assert list(ask()) == []
            with suppress(BackendError):
                assert backend.get(key(1)) is None
            with suppress(BackendError):
                list(backend.check(repair=True))
    backend = LmdbBackend(place)
    with closing(backend), pytest.raises(BackendError, match="not made by kcache.*name another"):
        backend.put(key(1), b"1")


@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_folder_is_refused_and_left_as_it_is(what: str, tmp_path: Path) -> None:
    place = tmp_path / "home" / "lmdb"
    place.parent.mkdir(mode=0o700)
    open_directory(str(place.parent))  # a cache, in which somebody has put something else
    FOREIGN[what](place)
    before = snapshot(place.parent)
    use_all(place)
    with open_engine(place.parent, backend="lmdb", max_size=1 << 20) as engine:
        assert not engine.put(key(1), entry())
        assert engine.get(key(1)) is None
        engine.clear()
        engine.trim(0)
    after = snapshot(place.parent)
    for path in set(after) - set(before):
        assert Path(path).parent == place.parent  # of the engine
    assert {path: after[path] for path in before if Path(path) != place.parent / "."} == {
        path: before[path] for path in before if Path(path) != place.parent / "."
    }


def test_a_lock_file_removed_beneath_an_open_cache_harms_nothing(tmp_path: Path) -> None:
    place = tmp_path / "lmdb"
    with closing(LmdbBackend(place)) as backend:
        backend.put(key(1), b"1")
        (place / "lock").unlink()
        with pytest.raises(BackendError, match="not made by kcache"):  # as far as can be seen
            backend.put(key(2), b"2")
        assert backend.get(key(1)) == b"1"


def test_files_that_others_put_beside_ours_are_never_removed(tmp_path: Path) -> None:
    place = tmp_path / "lmdb"
    kept = [place / "notes.txt", place / "old/mine", place / "db/mine"]
    with closing(LmdbBackend(place, max_size=4 << 20)) as backend:
        for number in range(60):
            backend.put(key(number), os.urandom(60_000))
        names("notes.txt", "old/mine")(place)
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


def test_a_folder_on_a_path_that_everybody_can_exchange_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "shared"
    place = open_to_all / "mine" / "lmdb"
    place.mkdir(parents=True)
    open_to_all.chmod(0o777)
    backend = LmdbBackend(place)
    with closing(backend), pytest.raises(BackendError, match="trusted.*shared.*0777"):
        backend.put(key(1), b"1")
    open_to_all.chmod(0o1777)  # as /tmp
    with closing(LmdbBackend(place)) as backend:
        backend.put(key(1), b"1")
        assert backend.get(key(1)) == b"1"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
@pytest.mark.parametrize("name", ["", "db", "db/data.mdb", "db/lock.mdb", "lock"])
@pytest.mark.parametrize("how", ["owner", "mode"])
def test_what_somebody_else_can_write_is_refused(name: str, how: str, tmp_path: Path) -> None:
    place = tmp_path / "lmdb"
    with closing(LmdbBackend(place)) as backend:
        backend.put(key(1), b"1")
    if how == "owner":
        os.chown(place / name, 65534, 65534)
    else:
        (place / name).chmod(0o777 if (place / name).is_dir() else 0o666)
    before = snapshot(place)
    with closing(LmdbBackend(place)) as backend:
        with pytest.raises(BackendError, match="can't be trusted|a file of user"):
            backend.get(key(1))
        with pytest.raises(BackendError, match="can't be trusted|a file of user"):
            backend.put(key(1), b"2")
    assert snapshot(place) == before


# -- bounds ----------------------------------------------------------------------------------------


def test_the_largest_cap_works(tmp_path: Path) -> None:
    with open_engine(tmp_path, backend="lmdb", max_size=LARGEST_CAP) as engine:
        assert engine.put(key(1), entry())
        assert engine.get(key(1)) == entry()
