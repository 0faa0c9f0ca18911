"""The counters of the `file` backend are never too low, whatever happens to their file."""

import os
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from core.helpers import QUICK, in_child, key, look, umask
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kcache.testing._base import as_threads
from kcache.util.locks import Backoff, is_locked
from kcache.util.open_file import OwnFile, open_own
from kcache_backends import _shards
from kcache_backends._shards import SHARDS, open_counters
from kcache_backends.file import FileBackend

COUNTERS = "counters"
LENGTH = 32 * SHARDS


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "file"


@pytest.fixture
def backend(place: Path) -> Iterator[FileBackend]:
    made = FileBackend(place)
    for number in range(30):
        made.put(key(number), bytes(number))
    yield made
    made.close()


def check(backend: FileBackend, place: Path) -> None:
    """Assert that the counters are exactly those of the files in `place`."""
    truth = look(place)
    assert backend.usage() == (truth.bytes, len(truth.entries))


@settings(QUICK, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, LENGTH - 1), st.integers(1, 255)), min_size=1, max_size=40)
)
def test_any_damage_to_the_counters_is_found(
    backend: FileBackend, place: Path, flips: list[tuple[int, int]]
) -> None:
    path = place / COUNTERS
    with path.open("r+b") as file:
        image = bytearray(file.read())
        for offset, bits in flips:
            image[offset] ^= bits
        file.seek(0)
        file.write(image)
    check(backend, place)


@pytest.mark.parametrize("mask", [0, 0o002, 0o022])
def test_recreated_directories_are_private(mask: int, tmp_path: Path) -> None:
    """A directory that a backend has to create again is private, as a new one is."""
    place = tmp_path / "cache" / "file"
    with closing(FileBackend(place)) as backend:
        backend.put(key(1), b"value")
        shutil.rmtree(tmp_path / "cache")
        with umask(mask):
            backend.put(key(1), b"value")
    for path in (place.parent, place, place / key(1)[:2]):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_processes_with_one_process_id_use_different_temporary_names(place: Path) -> None:
    """Processes in different PID namespaces may have the same id, but write different files."""
    noted = place.with_name("noted")
    with closing(FileBackend(place)) as backend, noted.open("a") as names:
        backend.put(key(2), b"another")
        real = os.replace

        def work() -> None:
            os.replace = lambda source, target: (  # type: ignore[assignment]
                print(os.path.basename(source), file=names, flush=True),
                real(source, target),
            )
            backend.put(key(1), b"value")

        for _ in range(2):
            in_child(work)
    assert len(set(noted.read_text().split())) == 2


def test_counters_that_are_just_being_made_are_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that opens the counters' file before it is filled does not report it as damaged."""
    made, found = threading.Event(), list[str]()

    def slow(path: str, flags: int) -> OwnFile:
        file = open_own(path, flags)
        if flags & os.O_CREAT:
            made.set()
            time.sleep(0.2)
        return file

    def check() -> None:
        made.wait(10)
        found.extend(FileBackend(tmp_path / "file").check())

    monkeypatch.setattr(_shards, "open_own", slow)
    as_threads(lambda: FileBackend(tmp_path / "file").usage(), check)
    assert found == []


def test_no_shard_is_written_while_the_counters_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All shards are locked while the counters are created, so no other process's put is lost."""
    path, locked, write = str(tmp_path / COUNTERS), [], _shards.pwrite

    def pwrite(fd: int, data: bytes, at: int) -> int:
        with open_own(path, os.O_RDWR) as file:
            locked.extend(is_locked(file, 32 * shard, 32) for shard in range(SHARDS))
        return write(fd, data, at)

    monkeypatch.setattr(_shards, "pwrite", pwrite)
    open_counters(path, lambda: None, Backoff(1.0)).file.close()
    assert locked == [True] * SHARDS
