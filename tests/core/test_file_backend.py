"""FileBackend: the storage contract, checked by the files that the backend writes."""

import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from core.helpers import (
    become_nobody,
    in_child,
    key,
    look,
    nobodys_directory,
    path_of,
    umask,
)

from kcache.directory import open_directory
from kcache.errors import ConfigError
from kcache_backends.file import FileBackend


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "file"


@pytest.fixture
def backend(place: Path) -> Iterator[FileBackend]:
    made = FileBackend(place)
    yield made
    made.close()


# -- values ------------------------------------------------------------------------------------


def test_one_private_file_for_each_entry(backend: FileBackend, place: Path) -> None:
    with umask(0):
        backend.put(key(1), b"value")
    path = place / key(1)[:2] / key(1)
    assert path.read_bytes() == b"value"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert look(place) == ({key(1): 5}, [])


def test_usage_is_exact_where_nothing_can_be_written() -> None:
    """Where the counters can't be written, as on a read-only file system, the usage is exact."""
    with nobodys_directory() as place:

        def child() -> None:
            become_nobody()
            FileBackend(place).put(key(1), b"value")
            (place / "counters").chmod(0o400)
            assert FileBackend(place).usage() == (5, 1)

        in_child(child)


# -- recency -----------------------------------------------------------------------------------


def test_entries_in_use_can_be_evicted(backend: FileBackend, place: Path) -> None:
    """`coldest` also yields entries that are used meanwhile, so a put can always evict some."""
    for number in range(4):
        backend.put(key(number), b"x")
    coldest = backend.coldest()
    next(coldest)
    for number in range(4):
        os.utime(path_of(place, key(number)))
    assert {info.key for info in coldest} == {key(1), key(2), key(3)}


# -- scale -------------------------------------------------------------------------------------

MANY = 5_000


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory of 5,000 empty entries; `key(n)` was last used n seconds after the epoch."""
    place = tmp_path_factory.mktemp("crowded") / "file"
    place.mkdir()
    open_directory(str(place))
    for shard in range(256):
        (place / f"{shard:02x}").mkdir()
    for number in range(MANY):
        path = path_of(place, key(number))
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
        os.utime(path, (number, number))
    yield place
    for path in place.glob("??/*"):
        path.unlink()


def test_coldest_samples_cold_entries(crowded: Path) -> None:
    backend = FileBackend(crowded)
    seconds = [info.used_ns // 10**9 for info in itertools.islice(backend.coldest(), MANY // 10)]
    assert max(seconds) < 3 * MANY // 4  # a sample may contain a few warmer ones
    assert sum(seconds) / len(seconds) < MANY // 4
    backend.close()


# -- check ---------------------------------------------------------------------------------------


def test_check_while_read_only(backend: FileBackend, place: Path) -> None:
    backend.put(key(1, "07"), b"12345")
    reader = FileBackend(place, read_only=True)
    assert list(reader.check(repair=True)) == []
    with (place / "counters").open("r+b") as file:
        file.seek(32 * 7)
        file.write(b"\xff")
    for _ in range(2):
        (found,) = reader.check(repair=True)
        assert found == "shard 07: its counter is damaged"
    (place / "counters").unlink()
    # A directory without counters is not damaged: the next writer creates them.
    assert list(reader.check()) == []
    reader.close()


def test_a_temporary_file_without_a_writer_is_removed(backend: FileBackend, place: Path) -> None:
    backend.put(key(1, "07"), b"12345")
    (place / "07" / f".{key(4)[:16]}-7-1.tmp").write_bytes(b"x")
    assert list(backend.check(repair=True)) == ["shard 07: 1 temporary file without a writer"]
    assert look(place).temporary == []


def test_full_durability(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        seen.append((stat.S_ISDIR(os.fstat(fd).st_mode), path_of(place, key(1)).exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    backend = FileBackend(place, durability="full")
    backend.put(key(1), b"value")
    assert seen[-2:] == [(False, False), (True, True)]  # earlier calls are for kcache.json
    assert backend.get(key(1)) == b"value"
    backend.close()
    with pytest.raises(ConfigError, match=r"durability: expected 'none' or 'full', got 'some'"):
        FileBackend(place, durability="some")  # type: ignore[arg-type]
