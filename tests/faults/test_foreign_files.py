"""Descriptors: whatever closes, removes or forks beside writers, no write lands in another's file."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import pytest
from core.helpers import entry, fork, key, output_of, wait
from faults.places import truth

from kcache import BackendError, CacheEngine, open_engine
from kcache.util.locks import lock
from kcache.util.open_file import open_own

FILES = pytest.mark.parametrize("name", ["file", "zstd"])
CONTENT = b"precious " * 1000
FOREIGN = 100


class Foreign:
    """Files of the program that come and go, so that every number that gets free is theirs soon."""

    def __init__(self, folder: Path, count: int) -> None:
        folder.mkdir()
        self.paths = [folder / str(number) for number in range(count)]
        for path in self.paths:
            path.write_bytes(CONTENT)
        self.open = [os.open(path, os.O_RDWR) for path in self.paths]

    def reopen(self, some: list[int]) -> None:
        for number in some:
            os.close(self.open[number])
        for number in some:
            self.open[number] = os.open(self.paths[number], os.O_RDWR)

    def changed(self) -> list[str]:
        return [path.name for path in self.paths if path.read_bytes() != CONTENT]

    def close(self) -> None:
        for fd in self.open:
            os.close(fd)


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Foreign]:
    files = Foreign(tmp_path / "foreign", FOREIGN)
    yield files
    assert files.changed() == []
    files.close()


@contextmanager
def writers(current: list[CacheEngine], count: int = 3) -> Iterator[None]:
    """Puts, gets and deletes without end, by several threads, in whatever engine is current."""
    done = threading.Event()
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        random = Random(seed)
        try:
            while not done.is_set():
                engine, number = current[0], random.randrange(40)
                engine.put(key(number), entry(random.randrange(50, 3000)))
                engine.get(key(random.randrange(40)))
                with suppress(BackendError):
                    engine.backend.usage()
                if random.random() < 0.2:
                    engine.delete(key(random.randrange(40)))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert failed == []


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.timeout(1800)
@FILES
def test_close_reopen_remove_and_fork_beside_puts_change_no_other_file(
    name: str, foreign: Foreign, tmp_path: Path, long: bool
) -> None:
    """Of 1,200 rounds of this 18 wrote into another file once, when numbers had no owner."""
    rounds, random = 20_000 if long else 300, Random(name)
    place, other = tmp_path / "cache", tmp_path / "other"
    with open_engine(other, backend=name) as beside:
        for number in range(10):
            assert beside.put(key(number), entry(500))
        expected = beside.backend.usage()
        before = descriptors()
        current = [open_engine(place, backend=name)]
        with writers(current):
            for turn in range(rounds):
                old = current[0]
                what = random.choice(("close", "close", "remove", "fork"))
                if what == "close":
                    old.close()
                    foreign.reopen(random.sample(range(FOREIGN), 6))
                    with suppress(BackendError):
                        current[0] = open_engine(place, backend=name)
                elif what == "remove":
                    with suppress(OSError):
                        shutil.rmtree(place / name)
                    foreign.reopen(random.sample(range(FOREIGN), 6))
                elif turn % 10 == 0:
                    pid = fork(lambda engine=old: engine.put(key(99), entry()))
                    foreign.reopen(random.sample(range(FOREIGN), 6))
                    assert wait(pid) == 0
        current[0].close()
        del old, current
        assert foreign.changed() == []
        assert descriptors() == before
        assert beside.backend.usage() == expected
    with open_engine(place, backend=name) as engine:
        sizes = truth(place, name)
        usage = engine.backend.usage()
        assert usage.bytes >= sum(sizes.values())
        assert usage.entries >= len(sizes)


@FILES
def test_a_put_after_close_is_refused_and_a_thread_at_work_ends_its_own(
    name: str, tmp_path: Path, foreign: Foreign
) -> None:
    engine = open_engine(tmp_path / "cache", backend=name)
    backend = engine.backend
    inner = getattr(backend, "inner", backend)
    reached, go_on, left = threading.Event(), threading.Event(), []
    fill = inner._fill

    def slow(fd: int, value: bytes) -> None:
        reached.set()
        assert go_on.wait(30)
        fill(fd, value)

    inner._fill = slow
    thread = threading.Thread(target=lambda: left.append(backend.put(key(1), b"x" * 100)))
    thread.start()
    assert reached.wait(30)
    engine.close()
    foreign.reopen(list(range(FOREIGN)))
    go_on.set()
    thread.join()
    assert left
    inner._fill = fill
    with pytest.raises(BackendError, match="closed"):
        backend.put(key(2), b"x")
    assert set(truth(tmp_path / "cache", name)) == {key(1)}
    with open_engine(tmp_path / "cache", backend=name) as again:
        assert again.backend.usage().entries == 1


DAEMON = """
import os, sys
from contextlib import suppress
from kcache import BackendError, Entry, open_engine
from kcache.engine.stats import FIELDS, StatsFile
place, foreign, name = sys.argv[1:]
key = lambda number: f"{number:064x}"
entry = Entry({"a": b"x" * 500})
engine = open_engine(place, backend=name)
stats = StatsFile(f"{place}/stats")
engine.put(key(1), entry)
stats.add([1] * len(FIELDS))
os.closerange(3, 200)
for number in range(20):
    os.open(f"{foreign}/{number}", os.O_RDWR)
for number in range(5):
    stored = engine.put(key(number), entry)
    assert engine.get(key(number)) == (entry if stored or number == 1 else None)
    with suppress(BackendError):
        stats.add([1] * len(FIELDS))
assert stored is ("lmdb" not in name)  # which opens no file twice
engine.close()
del engine, stats
for number in range(3, 23):
    assert os.readlink(f"/proc/self/fd/{number}").startswith(foreign)
"""


@pytest.mark.parametrize("name", ["file", "zstd", "lmdb", "zstd+lmdb"])
def test_a_program_that_closes_every_descriptor_gets_nothing_written_into_its_new_ones(
    name: str, tmp_path: Path
) -> None:
    """As programs that become daemons do; the numbers are those of other files then."""
    (tmp_path / "foreign").mkdir()
    for number in range(20):
        (tmp_path / "foreign" / str(number)).write_bytes(CONTENT)
    output_of(DAEMON, str(tmp_path / "cache"), str(tmp_path / "foreign"), name)
    for path in (tmp_path / "foreign").iterdir():
        assert path.read_bytes() == CONTENT


ONE_CLOSED = """
import os, sys
from kcache import Entry, open_engine
place, foreign, name, number = *sys.argv[1:4], int(sys.argv[4])
key = lambda number: f"{number:064x}"
entry = Entry({"a": b"x" * 500})
engine = open_engine(place, backend=name)
engine.put(key(1), entry)
numbers = sorted(map(int, os.listdir("/proc/self/fd")))
links = {n: f"/proc/self/fd/{n}" for n in numbers if os.path.lexists(f"/proc/self/fd/{n}")}
files = [n for n, link in links.items() if os.readlink(link).startswith(f"{place}/{name}")]
if number < len(files):
    os.dup2(os.open(f"{foreign}/0", os.O_RDWR), files[number])
    for n in range(5):
        stored = engine.put(key(n), entry)
        assert engine.get(key(n)) in ((entry,) if stored else (entry, None))
    engine.close()
    del engine
    assert os.readlink(f"/proc/self/fd/{files[number]}") == foreign + "/0"
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("name", ["file", "lmdb"])
def test_a_program_that_closes_one_descriptor_twice_gets_nothing_written_into_its_file(
    name: str, number: int, tmp_path: Path
) -> None:
    """Another thread opened a database in between: the second time, one of its files is closed."""
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "0").write_bytes(CONTENT)
    output_of(ONE_CLOSED, str(tmp_path / "cache"), str(tmp_path / "foreign"), name, str(number))
    assert (tmp_path / "foreign" / "0").read_bytes() == CONTENT


OTHER_CACHE = """
import os, sys
from kcache import Entry, open_engine
one, two, name = sys.argv[1:]
key = lambda number: f"{number:064x}"
first = open_engine(one, backend=name)
first.put(key(1), Entry({"a": b"x" * 9000}))
os.closerange(3, 200)
second = open_engine(two, backend=name)
second.put(key(1), Entry({"a": b"x"}))
second.put(key(2), Entry({"a": b"x"}))
before = second.backend.usage()
for number in range(5):
    first.delete(key(1))
    first.put(key(number), Entry({"a": b"x" * 9000}))
    assert second.backend.usage() == before
assert first.get(key(4))
print(sum(info.size for info in first.backend.scan()) - first.backend.usage().bytes)
"""


@FILES
def test_a_program_that_closes_every_descriptor_gets_no_count_into_another_cache(
    name: str, tmp_path: Path
) -> None:
    """Whose counters, under the number of the first cache's, are as sound as those."""
    printed = output_of(OTHER_CACHE, str(tmp_path / "one"), str(tmp_path / "two"), name)
    assert int(printed) == 0


def test_a_file_is_closed_with_the_last_reference_to_it(tmp_path: Path) -> None:
    file = open_own(str(tmp_path / "file"), os.O_RDWR | os.O_CREAT)
    number = file.fd
    del file
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(number)


def test_a_child_closes_its_copy_of_the_file_and_releases_no_lock(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    file = open_own(path, os.O_RDWR | os.O_CREAT)
    number = file.fd
    assert lock(file, 0)

    def child() -> None:
        assert file.closed
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(number)

    assert wait(fork(child)) == 0
    with open_own(path, os.O_RDWR) as other, pytest.raises(TimeoutError):
        lock(other, 0)


EXIT = """
import sys, threading, time
from kcache import Entry, open_engine
engine = open_engine(sys.argv[1], backend=sys.argv[2])
begun = threading.Barrier(4)
def work(number):
    begun.wait()
    while True:
        engine.put(f"{number}" * 64, Entry({"a": b"x" * 5000}))
        engine.get(f"{number}" * 64)
for number in range(3):
    threading.Thread(target=work, args=(number,), daemon=True).start()
begun.wait()
time.sleep(float(sys.argv[3]))  # so that exits come at any point of their work
"""


@FILES
def test_an_exit_beside_daemon_threads_ends_and_leaves_nothing_wrong(
    name: str, tmp_path: Path, long: bool
) -> None:
    for turn in range(200 if long else 4):
        output_of(EXIT, str(tmp_path), name, str(turn % 20 / 500))
    with open_engine(tmp_path, backend=name) as engine:
        sizes = truth(tmp_path, name)
        assert engine.backend.usage().bytes >= sum(sizes.values())
        engine.put(key(1), entry())
        assert engine.get(key(1)) == entry()
