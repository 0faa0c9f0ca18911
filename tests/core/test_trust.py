"""Another user's files are not trusted, wherever they lie below the cache's directory."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from core.helpers import entry, key, path_of

from kcache import BackendError, open_engine

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def give_away(path: Path) -> None:
    os.chown(path, 12345, 12345, follow_symlinks=False)


def open_to_all(path: Path) -> None:
    path.chmod(0o777 if path.is_dir() else 0o666)


HARMS: list[Callable[[Path], None]] = [pytest.param(give_away, marks=as_root), open_to_all]  # type: ignore[list-item]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("name", ["file", "zstd"])
def test_an_entry_file_of_somebody_else_is_a_counted_miss(
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
def test_a_directory_that_somebody_else_made_meanwhile_serves_nothing_of_theirs(
    tmp_path: Path,
) -> None:
    """A cleaner of the temporary directory removes the cache; the name is free for anybody."""
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
def test_a_database_of_somebody_else_is_not_opened_and_not_touched(
    read_only: bool, what: str, harm: Callable[[Path], None], tmp_path: Path
) -> None:
    with open_engine(tmp_path, backend="lmdb") as engine:
        engine.put(key(1), entry())
    harm(tmp_path / "lmdb" / what)
    before = (tmp_path / "lmdb/db/data.mdb").read_bytes()
    with open_engine(tmp_path, backend="lmdb", read_only=read_only) as engine:
        assert engine.get(key(1)) is None
        assert engine.put(key(2), entry()) is False
        assert engine.stats().errors > 0
        with pytest.raises(BackendError, match="can't be trusted"):
            engine.backend.get(key(1))
    assert (tmp_path / "lmdb/db/data.mdb").read_bytes() == before


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", ["file", "zstd"])
def test_a_backends_folder_of_somebody_else_is_not_written_to(
    name: str, harm: Callable[[Path], None], tmp_path: Path
) -> None:
    with open_engine(tmp_path, backend=name) as engine:
        engine.put(key(1), entry())
    harm(tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    with open_engine(tmp_path, backend=name) as engine:
        assert engine.put(key(2), entry()) is False
        assert engine.stats().errors > 0
        with pytest.raises(BackendError, match="can't be trusted"):
            engine.backend.usage()
    assert sorted(set(tmp_path.rglob("*")) - set(before)) == []
