"""The counters of the file backend: never below the truth, whatever happens to their file."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from core.helpers import QUICK, fork, key, look, output_of, path_of, python, wait
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kcache import BackendError
from kcache.directory import open_directory
from kcache.util.open_file import open_own
from kcache_backends._shards import SHARDS, ShardCount, ShardCounters
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
    """Asserts that the counters are exactly right."""
    truth = look(place)
    assert backend.usage() == (truth.bytes, len(truth.entries))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "zeroed": lambda image: bytes(len(image)),
    "ones": lambda image: b"\xff" * len(image),
    "random": lambda image: os.urandom(len(image)),
    "emptied": lambda _: b"",
    "truncated": lambda image: image[:100],
    "a record short": lambda image: image[:-32],
    "one byte short": lambda image: image[:-1],
    "extended": lambda image: image + b"more",
    "one record zeroed": lambda image: image[:320] + bytes(32) + image[352:],
    "one byte changed in every record": lambda image: bytes(
        byte ^ (n % 32 == 0) for n, byte in enumerate(image)
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("open_already", [True, False], ids=["open", "reopened"])
def test_damaged_counters_are_counted_afresh(
    damage: Callable[[bytes], bytes], open_already: bool, backend: FileBackend, place: Path
) -> None:
    path = place / COUNTERS
    if not open_already:
        backend.close()
    path.write_bytes(damage(path.read_bytes()))
    again = backend if open_already else FileBackend(place)
    check(again, place)
    again.put(key(100), b"new")
    again.delete(key(1))
    check(again, place)
    assert path.stat().st_size >= LENGTH
    again.close()


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


def test_usage_is_never_below_the_truth_while_a_record_is_damaged_again_and_again(
    backend: FileBackend, place: Path
) -> None:
    truth = look(place)
    reading, writing = os.pipe()

    def damage() -> None:
        with (place / COUNTERS).open("r+b", buffering=0) as file:
            for number in itertools.count():
                os.pwrite(file.fileno(), b"\xff" * 2048, 0)
                if number == 0:
                    os.write(writing, b"x")

    child = fork(damage)
    try:
        os.read(reading, 1)
        for _ in range(200):
            usage = backend.usage()
            assert usage.bytes >= truth.bytes
            assert usage.entries >= len(truth.entries)
    finally:
        os.kill(child, signal.SIGKILL)
        wait(child)
        os.close(reading)
        os.close(writing)


def test_counters_removed_while_open_come_back(backend: FileBackend, place: Path) -> None:
    (place / COUNTERS).unlink()
    backend.put(key(100), b"new")
    check(backend, place)
    assert (place / COUNTERS).stat().st_size == LENGTH


@pytest.mark.parametrize("first", ["put", "usage", "delete", "coldest", "get", "touch"])
def test_a_directory_removed_while_open_comes_back(
    first: str, backend: FileBackend, place: Path
) -> None:
    shutil.rmtree(place)
    operations: dict[str, Callable[[], object]] = {
        "put": lambda: backend.put(key(1), b"value"),
        "usage": backend.usage,
        "delete": lambda: backend.delete(key(1)),
        "coldest": lambda: list(backend.coldest()),
        "get": lambda: backend.get(key(1)),
        "touch": lambda: backend.touch(key(1)),
    }
    operations[first]()
    backend.put(key(1), b"value")
    assert backend.get(key(1)) == b"value"
    check(backend, place)
    with closing(FileBackend(place)) as other:
        assert other.usage() == (5, 1)


@pytest.mark.parametrize("mask", [0, 0o002, 0o022])
def test_what_is_made_again_is_for_the_user_alone(mask: int, tmp_path: Path) -> None:
    """Else the next process would refuse it as writable by others."""
    place = tmp_path / "cache" / "file"
    with closing(FileBackend(place)) as backend:
        shutil.rmtree(tmp_path / "cache")
        old = os.umask(mask)
        try:
            backend.put(key(1), b"value")
        finally:
            os.umask(old)
    for path in (place.parent, place, place / key(1)[:2]):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_directory_moved_away_while_open_is_replaced_by_a_new_one(
    backend: FileBackend, place: Path
) -> None:
    place.rename(place.with_name("old"))
    backend.put(key(1), b"value")
    assert backend.get(key(1)) == b"value"
    check(backend, place)


def test_a_directory_that_another_process_put_in_the_place_is_the_one_that_is_counted(
    backend: FileBackend, place: Path
) -> None:
    place.rename(place.with_name("old"))
    with closing(FileBackend(place)) as other:
        other.put(key(200, shard=9), bytes(1000))
        assert backend.usage() == (1000, 1)
        backend.put(key(201, shard=9), bytes(500))
        assert other.usage() == (1500, 2)


def test_counters_replaced_by_another_file_are_opened_again(
    backend: FileBackend, place: Path
) -> None:
    copy = place / "copy"
    copy.write_bytes(bytes(LENGTH))
    copy.rename(place / COUNTERS)
    check(backend, place)


def test_counters_that_cannot_be_opened_are_a_backend_error_until_they_can(place: Path) -> None:
    (place / COUNTERS).mkdir(parents=True)
    backend = FileBackend(place)
    assert backend.get(key(1)) is None
    for operation in (backend.usage, lambda: backend.put(key(1), b"x")):
        with pytest.raises(BackendError):
            operation()
    (place / COUNTERS).rmdir()
    backend.put(key(1), b"x")
    check(backend, place)
    backend.close()


def test_counters_are_not_followed_through_a_symlink(place: Path, tmp_path: Path) -> None:
    place.mkdir()
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (place / COUNTERS).symlink_to(victim)
    backend = FileBackend(place)
    with pytest.raises(BackendError):
        backend.put(key(1), b"x")
    assert victim.read_bytes() == b"precious"
    backend.close()


def test_entries_found_in_a_directory_without_counters_are_counted(place: Path) -> None:
    place.mkdir(mode=0o700)
    open_directory(str(place))
    for number in range(5):
        path = path_of(place, key(number))
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(10))
    backend = FileBackend(place)
    assert backend.usage() == (50, 5)
    backend.close()


def test_entries_deleted_by_others_are_forgotten_when_coldest_looks(
    backend: FileBackend, place: Path
) -> None:
    for number in range(0, 30, 2):
        path_of(place, key(number)).unlink()
    assert backend.usage().bytes >= look(place).bytes
    list(backend.coldest())
    check(backend, place)


def test_orphaned_temporary_files_are_removed(backend: FileBackend, place: Path) -> None:
    shard = path_of(place, key(1)).parent
    for number in range(3):
        (shard / f".{key(1)[:16]}-{number}-7.tmp").write_bytes(bytes(100))
    list(backend.coldest())
    assert look(place).temporary == []
    check(backend, place)


# Stands for a program in another PID namespace, where the process ids are the same.
NAMESAKE = """
import os, signal, sys
from kcache_backends.file import FileBackend
me = os.getpid()
os.getpid = lambda: 7
if sys.argv[3] == "dies":
    os.write = lambda *_: os.kill(me, signal.SIGKILL)
FileBackend(sys.argv[1]).put(sys.argv[2], b"value")
"""


def test_the_temporary_file_of_a_killed_namesake_is_no_obstacle(place: Path) -> None:
    FileBackend(place).close()
    path_of(place, key(1)).parent.mkdir(parents=True)
    assert python(NAMESAKE, place, key(1), "dies").returncode == -signal.SIGKILL
    assert len(look(place).temporary) == 1
    assert output_of(NAMESAKE, place, key(1), "lives") == ""
    assert look(place).entries == {key(1): 5}


def test_processes_with_one_process_id_use_different_temporary_names(place: Path) -> None:
    """As copies of one process do in several PID namespaces: all that Python knows is the same."""
    names: list[str] = []
    with closing(FileBackend(place)) as backend:
        real = os.replace
        for _ in range(2):
            reading, writing = os.pipe()

            def work(writing: int = writing) -> None:
                os.replace = lambda source, target: (  # type: ignore[assignment]
                    os.write(writing, os.path.basename(source).encode()),
                    real(source, target),
                )
                backend.put(key(1), b"value")

            assert wait(fork(work)) == 0
            names.append(os.read(reading, 100).decode())
            os.close(reading)
            os.close(writing)
    assert len(set(names)) == 2


def test_records_are_laid_out_as_documented(backend: FileBackend, place: Path) -> None:
    image = (place / COUNTERS).read_bytes()
    assert len(image) == LENGTH
    sizes = [0] * SHARDS
    for name, size in look(place).entries.items():
        sizes[int(name[:2], 16)] += size
    found = [int.from_bytes(image[n : n + 8], "little") for n in range(0, LENGTH, 32)]
    assert found == sizes


def test_a_record_that_is_under_way_is_counted_afresh_by_the_next_writer(
    backend: FileBackend, place: Path
) -> None:
    shard = int(key(1)[:2], 16)
    with open_own(str(place / COUNTERS), os.O_RDWR) as file:
        # As a writer that was killed leaves it.
        ShardCounters(file).write(shard, ShardCount(10**6, 100, 5))
    assert backend.usage().bytes >= 10**6
    backend.put(key(1), b"new")
    check(backend, place)
