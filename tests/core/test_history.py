"""The history: what was counted in each hour, in a file that never grows."""

from __future__ import annotations

import math
import os
import signal
import threading
import zlib
from pathlib import Path
from struct import pack

import pytest
from core.helpers import QUICK, entry, fork, key, wait
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kcache import BackendError, open_engine
from kcache.directory import prepare
from kcache.engine.history import COUNTED, HOUR_SECONDS, HOURS, History, Hour
from kcache.engine.stats import Counters, Flusher, Stats, StatsFile
from kcache.util.locks import RangeLocks
from kcache.util.marker import mark

#: An hour, counted from the epoch, and the bytes of the whole file.
FIRST = 490_000
SIZE = 64 + HOURS * 64


class Clock:
    """A clock that is set."""

    def __init__(self, hour: float = FIRST) -> None:
        self.hour = hour

    def __call__(self) -> float:
        return self.hour * HOUR_SECONDS


def counts(**counted: float) -> list[float]:
    """Returns counts in the order of the file."""
    return [counted.get(name, 0) for name in COUNTED]


def hour(number: int, **counted: float) -> Hour:
    return Hour(number * HOUR_SECONDS, *counts(**counted))


def numbers(told: Hour) -> list[float]:
    """Returns the counts of an hour, in the order of the file."""
    return [getattr(told, name) for name in COUNTED]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def history(path: Path, clock: Clock) -> History:
    return History(path, clock=clock)


def test_no_file_is_no_hours(history: History, path: Path) -> None:
    assert history.hours() == []
    assert not path.exists()


def test_what_is_added_in_an_hour_is_summed_and_hours_are_in_order(
    history: History, clock: Clock
) -> None:
    assert history.add(counts(hits=2, saved_seconds=0.25))
    clock.hour += 0.99
    assert history.add(counts(hits=1, misses=1))
    clock.hour += 30
    assert history.add(counts(evictions=4))
    assert history.hours() == [
        hour(FIRST, hits=3, misses=1, saved_seconds=0.25),
        hour(FIRST + 30, evictions=4),
    ]


def test_nothing_to_add_makes_no_file(history: History, path: Path) -> None:
    assert history.add(counts())
    assert not path.exists()


def test_only_the_last_90_days_are_told_and_the_file_never_grows(
    history: History, clock: Clock, path: Path
) -> None:
    for _ in range(3 * HOURS):
        history.add(counts(hits=1))
        clock.hour += 1
    clock.hour -= 1
    last = int(clock.hour)
    assert history.hours() == [hour(n, hits=1) for n in range(last - HOURS + 1, last + 1)]
    assert path.stat().st_size == SIZE
    clock.hour += HOURS
    assert history.hours() == []


def test_a_clock_that_is_set_back_adds_to_the_hour_that_it_shows(
    history: History, clock: Clock
) -> None:
    history.add(counts(hits=5))
    clock.hour -= 2
    history.add(counts(hits=1))
    assert history.hours() == [hour(FIRST - 2, hits=1)]
    clock.hour += 2
    assert history.hours() == [hour(FIRST - 2, hits=1), hour(FIRST, hits=5)]


amounts = st.lists(
    st.one_of(st.integers(0, 2**40).map(float), st.floats(0, 1e12)),
    min_size=len(COUNTED),
    max_size=len(COUNTED),
)


@settings(QUICK, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 5000), amounts), max_size=20))
def test_it_tells_what_a_dictionary_would(path: Path, steps: list[tuple[int, list[float]]]) -> None:
    path.unlink(missing_ok=True)
    clock = Clock()
    history = History(path, clock=clock)
    model: dict[int, list[float]] = {}
    for pause, added in steps:
        clock.hour += pause
        assert history.add(added)
        if any(added):
            sums = model.setdefault(int(clock.hour), counts())
            sums[:] = [a + b for a, b in zip(sums, added, strict=True)]
    expected = [
        Hour(n * HOUR_SECONDS, *sums) for n, sums in model.items() if n > clock.hour - HOURS
    ]
    assert history.hours() == expected


@settings(QUICK, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=2000), st.integers(0, SIZE))
def test_a_damaged_file_gives_numbers_and_can_be_added_to(
    path: Path, junk: bytes, offset: int
) -> None:
    mark(str(path.parent))
    path.unlink(missing_ok=True)
    history = History(path, clock=Clock(HOURS))  # the first record
    history.add(counts(hits=5))
    with path.open("r+b") as raw:
        raw.seek(offset)
        raw.write(junk)
    for _ in range(2):
        for told in history.hours():
            assert all(math.isfinite(value) and value >= 0 for value in numbers(told))
        assert history.add(counts(misses=1))
    assert history.hours()[-1].misses == 2


def test_records_that_the_checksum_fits_and_the_numbers_do_not_count_as_zeros(
    history: History, path: Path
) -> None:
    for value in (math.nan, math.inf, -1.0):
        body = pack("<q6d4x", FIRST, value, 1, 1, 1, 1, 1)
        image = bytearray(64 + HOURS * 64)
        image[:64] = b"kcache-history/1".ljust(64, b"\0")
        at = 64 + FIRST % HOURS * 64
        image[at : at + 64] = zlib.crc32(body).to_bytes(4, "little") + body
        path.write_bytes(image)
        assert history.hours() == []
        assert history.add(counts(hits=1))
        assert history.hours() == [hour(FIRST, hits=1)]


def test_the_file_is_laid_out_as_documented(history: History, path: Path) -> None:
    history.add([1, 2, 3, 4, 0.5, 0.25])
    body = pack("<q6d4x", FIRST, 1, 2, 3, 4, 0.5, 0.25)
    image = path.read_bytes()
    assert image[:64] == b"kcache-history/1".ljust(64, b"\0")
    at = 64 + FIRST % HOURS * 64
    assert image[at : at + 64] == zlib.crc32(body).to_bytes(4, "little") + body
    assert path.stat().st_mode & 0o777 == 0o600


def test_another_format_is_no_hours(history: History, path: Path) -> None:
    mark(str(path.parent))
    history.add(counts(hits=1))
    image = path.read_bytes()
    path.write_bytes(image.replace(b"kcache-history/1", b"kcache-history/2"))
    assert history.hours() == []
    history.add(counts(misses=1))
    assert path.read_bytes()[:64] == image[:64]


def test_processes_and_threads_add_up(path: Path, clock: Clock) -> None:
    def add() -> None:
        history = History(path, clock=clock)
        for _ in range(50):
            while not history.add(counts(hits=1, saved_seconds=0.5)):
                pass  # the other processes kept the lock for 20 ms: this machine is busy

    def work() -> None:
        threads = [threading.Thread(target=add) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    children = [fork(work) for _ in range(4)]
    assert [wait(child) for child in children] == [0] * 4
    assert History(path, clock=clock).hours() == [hour(FIRST, hits=600, saved_seconds=300)]


def test_a_killed_process_leaves_no_lock_and_what_it_had_added(
    history: History, clock: Clock
) -> None:
    def work() -> None:
        history.add(counts(hits=7))
        fd = os.open(history.path, os.O_RDWR)
        with RangeLocks(fd).held(64 + FIRST % HOURS * 64, 64):
            os.kill(os.getpid(), signal.SIGKILL)

    assert wait(fork(work)) == -signal.SIGKILL
    assert history.add(counts(hits=1))
    assert history.hours() == [hour(FIRST, hits=8)]


def test_a_lock_that_somebody_keeps_is_not_waited_for(history: History) -> None:
    history.add(counts(hits=1))
    fd = os.open(history.path, os.O_RDWR)
    try:
        with RangeLocks(fd).held(64 + FIRST % HOURS * 64, 64):
            assert not history.add(counts(hits=1))
    finally:
        os.close(fd)
    assert history.add(counts(hits=10))
    assert history.hours() == [hour(FIRST, hits=11)]


@pytest.mark.parametrize("kind", ["directory", "symlink", "no directory"])
def test_a_file_that_cannot_be_written_is_done_without(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "history"
    if kind == "directory":
        path.mkdir()
    elif kind == "symlink":
        (tmp_path / "victim").write_bytes(b"precious")
        path.symlink_to(tmp_path / "victim")
    else:
        path = tmp_path / "missing" / "history"
    history = History(path)
    assert not history.add(counts(hits=1))
    if kind == "directory":
        with pytest.raises(BackendError, match="history"):
            history.hours()
    if kind == "symlink":
        assert (tmp_path / "victim").read_bytes() == b"precious"


# -- through an engine ---------------------------------------------------------------------------


def told(place: Path) -> list[float]:
    """Returns the counts of all hours, summed; a test may run across the end of one."""
    hours = History(place / "history").hours()
    return [sum(column) for column in zip(counts(), *map(numbers, hours), strict=True)]


def test_an_engine_counts_by_the_hour_what_it_counts_in_all(tmp_path: Path) -> None:
    with open_engine(tmp_path) as engine:
        engine.put(key(1), entry(compile_seconds=0.5))
        engine.get(key(1))
        engine.get(key(1))
        engine.get(key(2))
        engine.flush()
        engine.get(key(3))
    assert told(tmp_path) == counts(hits=2, misses=2, saved_seconds=1)


def test_a_forked_child_does_not_count_again_what_its_parent_counted(tmp_path: Path) -> None:
    with open_engine(tmp_path) as engine:
        engine.get(key(1))

        def child() -> None:
            engine.get(key(1))
            engine.close()

        assert wait(fork(child)) == 0
    assert told(tmp_path) == counts(misses=2)


def test_what_could_not_be_added_is_added_with_the_next_flush(tmp_path: Path) -> None:
    counters = Counters()
    flusher = Flusher(counters, StatsFile(tmp_path / "stats"))
    (tmp_path / "history").mkdir()
    counters.add("misses")
    flusher.flush()
    assert StatsFile(tmp_path / "stats").total() == Stats(misses=1)
    (tmp_path / "history").rmdir()
    counters.add("misses")
    flusher.close()
    assert StatsFile(tmp_path / "stats").total() == Stats(misses=2)
    assert told(tmp_path) == counts(misses=2)


def test_a_history_that_cannot_be_written_changes_nothing_else(tmp_path: Path) -> None:
    prepare(str(tmp_path))
    (tmp_path / "history").mkdir()
    with open_engine(tmp_path) as engine:
        engine.put(key(1), entry())
        assert engine.get(key(1)) == entry()
        engine.flush()
        assert engine.stats().errors == 0
        assert engine.total_stats().hits == 1


def test_read_only_writes_no_history(tmp_path: Path) -> None:
    with open_engine(tmp_path) as engine:
        engine.put(key(1), entry())
        engine.get(key(1))
    before = (tmp_path / "history").read_bytes()
    with open_engine(tmp_path, read_only=True) as engine:
        assert engine.get(key(1)) == entry()
    assert (tmp_path / "history").read_bytes() == before


def test_setting_the_counts_to_zero_leaves_the_history(tmp_path: Path) -> None:
    with open_engine(tmp_path) as engine:
        engine.get(key(1))
    StatsFile(tmp_path / "stats").zero()
    assert told(tmp_path) == counts(misses=1)
