"""Descriptors: no write goes to a foreign file, even beside closes, removals and forks."""

import gc
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import pytest
from core.helpers import entry, fork, key, output_of, wait
from faults.places import NAMES, truth

from kcache import BackendError, CacheEngine, ConfigError, open_engine

ALL = pytest.mark.parametrize("name", NAMES)
CONTENT = b"precious " * 1000
FOREIGN = 100


class Foreign:
    """Files that are closed and opened all the time, so that they get every free descriptor."""

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
def writers(current: list[CacheEngine]) -> Iterator[None]:
    """Put, get and delete in three threads during the block, in the engine `current[0]`."""
    done = threading.Event()

    def work(seed: int) -> None:
        random = Random(seed)
        while not done.is_set():
            engine, number = current[0], random.randrange(40)
            engine.put(key(number), entry(random.randrange(50, 3000)))
            engine.get(key(random.randrange(40)))
            with suppress(BackendError):
                engine.backend.usage()
            if random.random() < 0.2:
                engine.delete(key(random.randrange(40)))

    with ThreadPoolExecutor(3) as pool:
        works = [pool.submit(work, number) for number in range(3)]
        try:
            yield
        finally:
            done.set()
    assert [each.result() for each in works] == [None] * 3


@pytest.mark.timeout(1800)
@ALL
def test_no_write_into_other_files(name: str, foreign: Foreign, tmp_path: Path, long: bool) -> None:
    """Before descriptors had owners, 18 of 1,200 rounds of this test wrote to a foreign file."""
    rounds, random = 20_000 if long else 80, Random(name)
    place, other = tmp_path / "cache", tmp_path / "other"
    with open_engine(other, backend=name) as beside:
        for number in range(10):
            assert beside.put(key(number), entry(500))
        expected = beside.backend.usage()
        before = len(os.listdir("/proc/self/fd"))
        current = [open_engine(place, backend=name)]
        with writers(current):
            for turn in range(rounds):
                old = current[0]
                what = random.choice(("close", "drop", "remove", "fork"))
                if what == "remove":
                    shutil.rmtree(random.choice((place, place / name)), ignore_errors=True)
                elif what == "fork":
                    if turn % 10 == 0:
                        assert wait(fork(lambda engine=old: engine.put(key(99), entry()))) == 0
                else:
                    if what == "close":
                        old.close()
                    with suppress(BackendError, ConfigError):  # the directory is being removed
                        current[0] = open_engine(place, backend=name)
                foreign.reopen(random.sample(range(FOREIGN), 6))
        current[0].close()
        del old, current
        gc.collect()
        assert foreign.changed() == []
        assert len(os.listdir("/proc/self/fd")) <= before
        assert beside.backend.usage() == expected
    shutil.rmtree(place, ignore_errors=True)
    with open_engine(place, backend=name) as engine:
        assert engine.put(key(1), entry())
        assert engine.get(key(1)) == entry()
        assert truth(place, name).keys() == {key(1)}


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
assert bool(stored) is ("lmdb" not in name)  # LMDB can't open its file again
engine.close()
del engine, stats
for number in range(3, 23):
    assert os.readlink(f"/proc/self/fd/{number}").startswith(foreign)
"""


@ALL
def test_closed_descriptors(name: str, foreign: Foreign, tmp_path: Path) -> None:
    """Programs that become daemons do this. A cache's descriptors then belong to other files."""
    output_of(DAEMON, tmp_path / "cache", foreign.paths[0].parent, name)
