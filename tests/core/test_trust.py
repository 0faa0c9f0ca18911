"""Files of another user are not trusted, wherever in the cache's directory they are."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from core.helpers import as_root, entry, key, path_of, run

from kcache import BackendError, open_engine


def give_away(path: Path) -> None:
    os.chown(path, 12345, 12345, follow_symlinks=False)


def open_to_all(path: Path) -> None:
    path.chmod(0o777 if path.is_dir() else 0o666)


HARMS: list[Callable[[Path], None]] = [pytest.param(give_away, marks=as_root), open_to_all]  # type: ignore[list-item]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("name", ["file", "zstd"])
def test_another_users_entry_file_is_a_counted_miss(
    name: str, read_only: bool, harm: Callable[[Path], None], tmp_path: Path
) -> None:
    with open_engine(tmp_path, backend=name) as engine:
        engine.put(key(1), entry())
        engine.put(key(2), entry())
    harm(path_of(tmp_path / name, key(1)))
    with open_engine(tmp_path, backend=name, read_only=read_only) as engine:
        assert engine.get(key(1)) is None
        assert engine.get(key(2)) == entry()
        assert (engine.stats().corrupt, engine.stats().errors) == (1, 0)
        if not read_only:
            assert engine.put(key(1), entry())
            assert engine.get(key(1)) == entry()


@as_root
def test_a_directory_that_another_user_has_replaced(
    tmp_path: Path,
) -> None:
    """If a cleaner removes the cache from /tmp, files that another user puts there are not used."""
    with open_engine(tmp_path / "cache") as engine:
        engine.put(key(1), entry())
        os.rename(tmp_path / "cache", tmp_path / "moved")
        for place in (tmp_path / "cache", tmp_path / "cache/file", path_of("", key(1)).parent):
            where = tmp_path / "cache" / "file" / place if not place.is_absolute() else place
            where.mkdir(exist_ok=True)
            give_away(where)
        theirs = path_of(tmp_path / "cache/file", key(1))
        theirs.write_bytes(path_of(tmp_path / "moved/file", key(1)).read_bytes())
        give_away(theirs)
        assert engine.get(key(1)) is None
        assert engine.stats().corrupt == 1


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("what", ["", "db", "db/data.mdb", "db/lock.mdb"])
@pytest.mark.parametrize("read_only", [False, True])
def test_another_users_database_is_neither_opened_nor_changed(
    read_only: bool, what: str, harm: Callable[[Path], None], tmp_path: Path
) -> None:
    with open_engine(tmp_path, backend="lmdb") as engine:
        engine.put(key(1), entry())
    harm(tmp_path / "lmdb" / what)
    before = (tmp_path / "lmdb/db/data.mdb").read_bytes()
    with open_engine(tmp_path, backend="lmdb", read_only=read_only) as engine:
        assert engine.get(key(1)) is None
        assert not engine.put(key(2), entry())
        assert engine.stats().errors > 0
        with pytest.raises(BackendError, match="can't be trusted"):
            engine.backend.get(key(1))
    assert (tmp_path / "lmdb/db/data.mdb").read_bytes() == before


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", ["file", "zstd"])
def test_folders_of_other_users(name: str, harm: Callable[[Path], None], tmp_path: Path) -> None:
    with open_engine(tmp_path, backend=name) as engine:
        engine.put(key(1), entry())
    harm(tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    with open_engine(tmp_path, backend=name) as engine:
        assert not engine.put(key(2), entry())
        assert engine.stats().errors > 0
        with pytest.raises(BackendError, match="can't be trusted"):
            engine.backend.usage()
    assert sorted(set(tmp_path.rglob("*")) - set(before)) == []


# -- user namespaces -------------------------------------------------------------------------------

GETS = """
import sys
from kcache import KernelCache
with KernelCache(sys.argv[1]) as cache:
    print(cache.directory, cache.engine.get(sys.argv[2]))
"""
OPENS = """
import sys
from kcache import ConfigError
from kcache.directory import open_directory, require_safe_layer
try:
    {"open": open_directory, "read": require_safe_layer}[sys.argv[1]](sys.argv[2])
except ConfigError as error:
    print(error)
"""


def in_namespace(maps: str, code: str, *arguments: object) -> tuple[str, list[str]]:
    """Run code in a user namespace; return its output, and the lines of its standard error."""
    unshared = ["unshare", maps, "--"]
    if shutil.which("unshare") is None or run(*unshared, "true").returncode != 0:
        pytest.skip("there are no user namespaces")
    done = run(*unshared, sys.executable, "-c", code, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.splitlines()


@as_root
def test_the_overflow_user_id_trusts_no_cache(tmp_path: Path) -> None:
    """In a user namespace, all users without an id there appear as one user, who is not trusted."""
    with open_engine(tmp_path / "cache") as engine:
        engine.put(key(1), entry())
    for path in (tmp_path / "cache", *(tmp_path / "cache").rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
        give_away(path)
    tmp_path.chmod(0o755)
    for place in ("cache", "new"):
        out, (line,) = in_namespace("--user", GETS, tmp_path / place, key(1))
        assert out == "None None"
        assert "user 65534 stands for every user without an id in this user namespace" in line
        assert line.endswith("This process caches in memory alone")
    out, (line,) = in_namespace(
        "--user", GETS.replace("1])", "1], read_only=True)"), "/new", key(1)
    )
    assert line.endswith("This process caches in memory alone")


@as_root
@pytest.mark.parametrize("planted", ["a link", "a directory"])
def test_shared_directories_in_a_user_namespace(planted: str, tmp_path: Path) -> None:
    """Below a shared directory, the overflow user is not trusted. Elsewhere, it may be root."""
    shared, mine = tmp_path / "tmp", tmp_path / "mine"
    shared.mkdir()
    shared.chmod(0o1777)
    mine.mkdir(mode=0o700)
    if planted == "a link":
        (shared / "theirs").symlink_to(mine)
    else:
        (shared / "theirs" / "cache").mkdir(parents=True, mode=0o700)
        (shared / "theirs").chmod(0o755)
    give_away(shared / "theirs")
    out, _ = in_namespace("--map-root-user", OPENS, "open", shared / "theirs" / "cache")
    assert f"{shared}/theirs" in out
    assert "65534" in out
