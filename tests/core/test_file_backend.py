"""FileBackend: the storage contract, looked at through the files that it writes."""

from __future__ import annotations

import gc
import itertools
import os
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Self

import pytest
from core.helpers import fork, key, look, path_of, wait

from kcache import BackendError, ConfigError, Usage
from kcache.directory import open_directory
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


def test_a_value_is_returned_as_it_was_put(backend: FileBackend) -> None:
    for number, value in enumerate([b"", b"\0", b"value", os.urandom(300_000)]):
        assert backend.put(key(number), value) == len(value)
        assert backend.get(key(number)) == value
        assert backend.use(key(number)) == value


def test_a_missing_key_is_none(backend: FileBackend, place: Path) -> None:
    assert backend.get(key(1)) is None
    assert backend.use(key(1)) is None
    assert backend.delete(key(1)) == 0
    backend.touch(key(1))
    assert look(place).entries == {}


def test_the_last_value_wins(backend: FileBackend, place: Path) -> None:
    for value in (b"first", b"a longer second", b"3"):
        backend.put(key(1), value)
        assert backend.get(key(1)) == value
        assert backend.usage() == (len(value), 1) == (look(place).bytes, 1)


def test_delete_tells_what_it_freed_once(backend: FileBackend, place: Path) -> None:
    backend.put(key(1), b"12345")
    assert backend.delete(key(1)) == 5
    assert backend.delete(key(1)) == 0
    assert backend.usage() == (0, 0)
    assert look(place) == ({}, [])


def test_one_private_file_per_entry_below_its_first_two_digits(
    backend: FileBackend, place: Path
) -> None:
    old = os.umask(0)
    try:
        backend.put(key(1), b"value")
    finally:
        os.umask(old)
    path = place / key(1)[:2] / key(1)
    assert path.read_bytes() == b"value"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert look(place) == ({key(1): 5}, [])


def test_another_process_sees_and_counts_what_this_one_wrote(
    backend: FileBackend, place: Path
) -> None:
    backend.put(key(1), b"12345")

    def other() -> None:
        second = FileBackend(place)
        assert second.get(key(1)) == b"12345"
        assert second.usage() == (5, 1)
        second.put(key(2), b"123")
        second.delete(key(1))

    assert wait(fork(other)) == 0
    assert backend.get(key(1)) is None
    assert backend.get(key(2)) == b"123"
    assert backend.usage() == (3, 1)


def test_scan_yields_every_entry_and_nothing_else(backend: FileBackend, place: Path) -> None:
    sizes = {key(n): n for n in range(50)}
    for name, size in sizes.items():
        backend.put(name, bytes(size))
    shard = path_of(place, key(1)).parent
    (shard / "notes.txt").write_bytes(b"x")
    (shard / f".{key(1)[:16]}-1-1.tmp").write_bytes(b"x")
    (shard / key(1).upper()).write_bytes(b"x")
    (shard / key("a directory")).mkdir()
    assert {info.key: info.size for info in backend.scan()} == sizes


def test_scan_and_coldest_tolerate_deletes_meanwhile(backend: FileBackend, place: Path) -> None:
    for number in range(40):
        backend.put(key(number), b"x")
    for listing in (backend.scan, backend.coldest):
        found = []
        for info in listing():
            found.append(info.key)
            for path in itertools.islice(sorted(place.glob("??/*")), 3):
                path.unlink()
        assert len(found) == len(set(found)) <= 40
        for number in range(40):
            backend.put(key(number), b"x")


def test_full_durability_stores_the_same(place: Path) -> None:
    backend = FileBackend(place, durability="full")
    backend.put(key(1), b"value")
    assert backend.get(key(1)) == b"value"
    assert backend.usage() == (5, 1)
    backend.close()


def test_another_durability_is_refused_by_name(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"durability='some'.*none.*full"):
        FileBackend(place, durability="some")  # type: ignore[arg-type]


# -- recency -----------------------------------------------------------------------------------


def test_coldest_is_the_order_of_last_use(backend: FileBackend) -> None:
    for number in range(6):
        backend.put(key(number), b"x")
    backend.use(key(0))
    backend.touch(key(2))
    backend.put(key(1), b"y")
    backend.get(key(3))  # no use
    assert [info.key for info in backend.coldest()] == [key(n) for n in (3, 4, 5, 0, 2, 1)]


def test_every_use_counts_however_often_a_key_is_used(backend: FileBackend) -> None:
    order = [key(n) for n in range(8)]
    for name in order:
        backend.put(name, b"x")
    random = Random(5)
    for _ in range(300):
        name = random.choice(order)
        backend.use(name)
        order.remove(name)
        order.append(name)
    assert [info.key for info in backend.coldest()] == order


def test_a_use_in_another_process_counts(backend: FileBackend, place: Path) -> None:
    for number in range(3):
        backend.put(key(number), b"x")

    def other() -> None:
        second = FileBackend(place)
        second.use(key(0))
        second.close()

    assert wait(fork(other)) == 0
    assert [info.key for info in backend.coldest()] == [key(1), key(2), key(0)]


def test_times_come_from_the_clock_and_never_run_backwards(place: Path) -> None:
    ticks = itertools.chain([5_000, 4_000, 4_000], itertools.repeat(9_000))
    backend = FileBackend(place, clock=lambda: next(ticks))
    for number in range(4):
        backend.put(key(number), b"x")
    assert [info.used_ns for info in backend.coldest()] == [5_000, 5_001, 5_002, 9_000]
    backend.close()


def test_a_use_while_coldest_is_read_takes_the_entry_to_the_end(backend: FileBackend) -> None:
    for number in range(4):
        backend.put(key(number), b"x")
    coldest = backend.coldest()
    assert next(coldest).key == key(0)
    backend.touch(key(1))
    assert [info.key for info in coldest] == [key(2), key(3), key(1)]


def test_two_iterations_at_once_do_not_take_from_each_other(backend: FileBackend) -> None:
    names = [key(n) for n in range(6)]
    for name in names:
        backend.put(name, b"x")
    next(backend.coldest())  # leaves the rest of its sample to the next iteration
    one = backend.coldest()
    first = [next(one).key]
    assert [info.key for info in backend.coldest()] == names
    assert first + [info.key for info in one] == names


def test_entries_that_are_used_all_the_time_can_still_be_evicted(
    backend: FileBackend, place: Path
) -> None:
    """Without this a put would find nothing to evict, and exceed the cap."""
    for number in range(4):
        backend.put(key(number), b"x")
    coldest = backend.coldest()
    next(coldest)
    for number in range(4):
        os.utime(path_of(place, key(number)))
    assert {info.key for info in coldest} == {key(1), key(2), key(3)}


# -- scale -------------------------------------------------------------------------------------

MANY = 20_000


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory of 20,000 empty entries; key(n) was used at second n."""
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


class Looks:
    """Counts the files that are looked at, through stat or while listing a directory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        stat, scandir = os.stat, os.scandir

        def counting_stat(*args: object, **kwargs: object) -> os.stat_result:
            self.count += 1
            return stat(*args, **kwargs)  # type: ignore[arg-type]

        class CountingEntry:
            def __init__(self, item: os.DirEntry[str]) -> None:
                self.name, self.path, self._item = item.name, item.path, item

            def stat(entry, *, follow_symlinks: bool = True) -> os.stat_result:  # noqa: N805
                self.count += 1
                return entry._item.stat(follow_symlinks=follow_symlinks)

        class CountingListing:
            def __init__(self, path: str) -> None:
                self._items = scandir(path)

            def __enter__(self) -> Self:
                return self

            def __exit__(self, *_: object) -> None:
                self._items.close()

            def __iter__(self) -> Iterator[CountingEntry]:
                return map(CountingEntry, self._items)

        monkeypatch.setattr(os, "stat", counting_stat)
        monkeypatch.setattr(os, "lstat", counting_stat)
        monkeypatch.setattr(os, "scandir", CountingListing)


def test_the_first_of_coldest_looks_at_a_sample_only(
    crowded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FileBackend(crowded)
    assert backend.usage() == (0, MANY)  # counted once, here; then known
    looks = Looks(monkeypatch)
    first = next(backend.coldest())
    assert 0 < looks.count <= 4096
    assert first.used_ns < MANY // 10 * 10**9
    backend.close()


def test_coldest_yields_every_one_of_many_entries_once(crowded: Path) -> None:
    backend = FileBackend(crowded)
    found = [info.key for info in backend.coldest()]
    assert len(found) == len(set(found)) == MANY
    backend.close()


def test_what_coldest_offers_of_many_entries_is_cold(crowded: Path) -> None:
    backend = FileBackend(crowded)
    seconds = [info.used_ns // 10**9 for info in itertools.islice(backend.coldest(), MANY // 10)]
    assert max(seconds) < MANY // 2
    assert sum(seconds) / len(seconds) < MANY // 4
    backend.close()


def test_opening_and_usage_of_many_entries_look_at_none(
    crowded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FileBackend(crowded)
    backend.usage()
    backend.close()
    looks = Looks(monkeypatch)
    backend = FileBackend(crowded)
    assert backend.usage() == (0, MANY)
    assert looks.count <= 4
    backend.close()


# -- what cannot be read or written --------------------------------------------------------------


def test_a_symlink_in_the_place_of_an_entry_is_not_followed(
    backend: FileBackend, place: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    backend.put(key(1), b"value")
    path = path_of(place, key(1))
    path.unlink()
    path.symlink_to(secret)
    with pytest.raises(BackendError):
        backend.get(key(1))
    with pytest.raises(BackendError):
        backend.use(key(1))
    backend.put(key(1), b"mine")
    assert secret.read_bytes() == b"secret"
    assert not path.is_symlink()
    assert backend.get(key(1)) == b"mine"


def test_a_symlink_in_the_place_of_an_entry_does_not_spoil_the_usage(
    backend: FileBackend, place: Path, tmp_path: Path
) -> None:
    for other in range(2, 5):
        backend.put(key(other, shard=7), b"12345")
    for operation in ("put", "delete"):
        name = key(operation, shard=7)
        path_of(place, name).symlink_to(tmp_path / ("x" * 100))
        if operation == "put":
            backend.put(name, b"v")
        else:
            backend.delete(name)
        truth = look(place)
        assert backend.usage().bytes >= sum(
            size for found, size in truth.entries.items() if not path_of(place, found).is_symlink()
        )


def test_a_pipe_in_the_place_of_an_entry_is_not_waited_for(
    backend: FileBackend, place: Path
) -> None:
    backend.put(key(1), b"value")
    path_of(place, key(1)).unlink()
    os.mkfifo(path_of(place, key(1)))

    def child() -> None:
        for read in (backend.get, backend.use):
            assert not read(key(1))
        backend.put(key(1), b"mine")
        assert backend.get(key(1)) == b"mine"

    assert wait(fork(child)) == 0


def test_a_directory_in_the_place_of_an_entry_is_a_backend_error(
    backend: FileBackend, place: Path
) -> None:
    path_of(place, key(1)).mkdir(parents=True)
    (path_of(place, key(1)) / "theirs").touch()  # an empty one makes way
    for operation in (backend.get, backend.use, lambda name: backend.put(name, b"x")):
        with pytest.raises(BackendError):
            operation(key(1))
    backend.put(key(2), b"x")
    assert backend.usage().bytes >= 1


def test_a_file_in_the_place_of_a_shard_spoils_that_shard_only(
    backend: FileBackend, place: Path
) -> None:
    backend.put(key(1, shard=3), b"12345")
    path_of(place, key(1, shard=3)).unlink()
    (place / "03").rmdir()
    (place / "03").write_bytes(b"not a directory")
    for operation in (backend.get, lambda name: backend.put(name, b"x")):
        with pytest.raises(BackendError):
            operation(key(1, shard=3))
    for shard in (2, 4):
        backend.put(key(1, shard=shard), b"123")
    assert {info.key for info in backend.scan()} == {key(1, shard=2), key(1, shard=4)}
    assert {info.key for info in backend.coldest()} == {key(1, shard=2), key(1, shard=4)}


def test_a_failed_put_leaves_the_old_value_and_no_temporary_file(
    backend: FileBackend, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.put(key(1), b"old")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for name in (key(1), key(2)):
        with pytest.raises(BackendError, match="No space left"):
            backend.put(name, b"new")
    monkeypatch.undo()
    assert backend.get(key(1)) == b"old"
    assert look(place) == ({key(1): 3}, [])
    assert backend.usage() == (3, 1)


def test_short_writes_are_completed(backend: FileBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
    backend.put(key(1), bytes(range(100)))
    monkeypatch.undo()
    assert backend.get(key(1)) == bytes(range(100))


def test_read_only_reads_and_changes_nothing(place: Path) -> None:
    missing = FileBackend(place, read_only=True)
    assert (missing.get(key(1)), missing.usage(), list(missing.scan())) == (None, (0, 0), [])
    assert not place.exists()
    writer = FileBackend(place)
    writer.put(key(1), b"12345")
    writer.close()
    os.utime(path_of(place, key(1)), (1, 1))
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}

    reader = FileBackend(place, read_only=True)
    assert reader.get(key(1)) == b"12345"
    assert reader.usage() == Usage(5, 1)
    assert [info.key for info in reader.scan()] == [key(1)]
    for write in (lambda: reader.put(key(2), b"x"), lambda: reader.delete(key(1))):
        with pytest.raises(BackendError):
            write()
    reader.close()
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before


# -- closing, threads, fork ----------------------------------------------------------------------


def test_close_is_idempotent_and_what_follows_fails_as_a_backend_error(
    backend: FileBackend, place: Path
) -> None:
    backend.put(key(1), b"12345")
    backend.use(key(1))
    backend.close()
    backend.close()
    for operation in (
        lambda: backend.put(key(2), b"x"),
        lambda: backend.delete(key(1)),
        backend.usage,
    ):
        with pytest.raises(BackendError):
            operation()
    assert backend.get(key(1)) in (None, b"12345")
    assert look(place).entries == {key(1): 5}


def test_a_backend_that_is_let_go_leaves_no_file_open(place: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        FileBackend(place).put(key(1), b"x")
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_may_use_every_method_at_once(
    backend: FileBackend, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kcache_backends.file.TOUCH_AGAIN", 50_000)
    names = [key(n, shard=n % 3) for n in range(12)]
    errors: list[BaseException] = []
    done = threading.Event()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def write(seed: int) -> None:
        random = Random(seed)
        for _ in range(100):
            name = random.choice(names)
            if random.random() < 0.8:
                backend.put(name, name[:8].encode() * random.randrange(100))
            else:
                backend.delete(name)

    def read(seed: int) -> None:
        random = Random(seed)
        while not done.is_set():
            name = random.choice(names)
            value = backend.use(name)
            assert value is None or value == name[:8].encode() * (len(value) // 8)
            backend.touch(name)

    def enumerate_(seed: int) -> None:
        while not done.is_set():
            list(backend.coldest() if seed % 2 else backend.scan())
            assert backend.usage().entries <= len(names) + 4

    def run(work: object, seed: int) -> None:
        try:
            work(seed)  # type: ignore[operator]
        except BaseException as error:
            errors.append(error)
            done.set()

    writers = [threading.Thread(target=run, args=(write, n)) for n in range(2)]
    others = [threading.Thread(target=run, args=(read, n)) for n in range(3)]
    others += [threading.Thread(target=run, args=(enumerate_, n)) for n in range(3)]
    try:
        for thread in writers + others:
            thread.start()
        for thread in writers:
            thread.join()
        done.set()
        for thread in others:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    truth = look(place)
    assert backend.usage() == (truth.bytes, len(truth.entries))
    assert truth.temporary == []


def test_a_child_goes_on_where_a_thread_of_its_parent_held_every_lock(
    backend: FileBackend, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.put(key(1, shard=1), b"1")
    holding, release = threading.Event(), threading.Event()
    real = os.replace

    def stalled(source: str, target: str) -> None:
        if threading.current_thread() is thread:
            holding.set()
            release.wait()
        real(source, target)

    monkeypatch.setattr(os, "replace", stalled)
    thread = threading.Thread(target=lambda: backend.put(key(3, shard=1), b"3"))
    thread.start()
    holding.wait()

    def child() -> None:
        backend.put(key(2, shard=2), b"2")
        assert backend.usage().entries == 3

    try:
        assert wait(fork(child)) == 0
    finally:
        release.set()
        thread.join()
    assert backend.usage() == (3, 3)
    assert len(look(place).entries) == 3


# -- check ---------------------------------------------------------------------------------------


def test_check_opened_for_reading_only_sees_wrong_counters(
    backend: FileBackend, place: Path
) -> None:
    backend.put(key(1, shard=7), b"12345")
    reader = FileBackend(place, read_only=True)
    assert list(reader.check(repair=True)) == []
    with (place / "counters").open("r+b") as file:
        file.seek(32 * 7)
        file.write(b"\xff")
    for _ in range(2):
        (found,) = reader.check(repair=True)
        assert found == "shard 07: its counter is damaged"
    (place / "counters").unlink()
    # A copy without counters, which the next writer has to create.
    assert list(reader.check()) == []
    reader.close()


def test_what_a_killed_writer_leaves_is_no_fault(place: Path) -> None:
    def die() -> None:
        backend = FileBackend(place)
        backend.put(key(1, shard=7), b"12345")
        backend._fill = lambda fd, value: os._exit(9)  # type: ignore[method-assign]
        backend.put(key(2, shard=7), b"1234567890")

    assert wait(fork(die)) == 9
    assert len(look(place).temporary) == 1
    backend = FileBackend(place)
    assert list(backend.check()) == []
    backend.put(key(3, shard=7), b"123")
    assert look(place).temporary == []
    assert backend.usage() == (8, 2)
    (place / "07" / f".{key(4)[:16]}-7-1.tmp").write_bytes(b"x")
    assert list(backend.check(repair=True)) == [
        "shard 07: 1 temporary files that nobody is writing"
    ]
    assert look(place).temporary == []
    backend.close()
