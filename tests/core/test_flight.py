"""Flight: one of many makes the value, whoever is killed, stopped, forked or interrupted."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core.helpers import entry, fork, key, together, wait
from faults.places import stopped

from kcache import CompileError, open_engine
from kcache.engine.single_flight import Flight, lock_key
from kcache.engine.stats import Counters
from kcache.util.locks import is_locked
from kcache.util.open_file import open_own

KEY = key("flight")
LONG = 60.0
Make = Callable[[], tuple[str, str | None]]


class Shelf:
    """A value in a file, and how often it was made: one byte per making, whoever makes it."""

    def __init__(self, folder: Path) -> None:
        self.value = folder / "value"
        self.made = folder / "made"
        self.made.touch()
        self.path = str(folder / "flight")
        self.counters = Counters()

    def flight(self, path: str | None = "") -> Flight:
        return Flight(self.path if path == "" else path, wait=LONG, counters=self.counters)

    def ask(self, flight: Flight, make: Make | None = None) -> str:
        return flight.run(KEY, self.look, make or self.make, str)

    def look(self) -> str | None:
        try:
            return self.value.read_text()
        except FileNotFoundError:
            return None

    def make(self) -> tuple[str, str]:
        self.count()
        temporary = self.value.with_suffix(f".{os.getpid()}")
        temporary.write_text("made")
        temporary.rename(self.value)
        return "made", "made"

    def count(self) -> None:
        with self.made.open("ab", buffering=0) as file:
            file.write(b".")

    @property
    def times(self) -> int:
        return self.made.stat().st_size

    @property
    def counts(self) -> tuple[int, int, int]:
        stats = self.counters.snapshot()
        return stats.coalesced, stats.wait_timeouts, stats.unlocked


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


@pytest.mark.parametrize("between_processes", [False, True])
class TestThreads:
    @pytest.fixture
    def one(self, shelf: Shelf, between_processes: bool) -> Flight:
        return shelf.flight("" if between_processes else None)

    def test_one_makes_and_all_get_it(self, one: Flight, shelf: Shelf) -> None:
        assert together(16, lambda: shelf.ask(one)) == ["made"] * 16
        assert shelf.times == 1

    def test_asked_for_while_making_it(self, one: Flight, shelf: Shelf) -> None:
        assert shelf.ask(one, lambda: (shelf.ask(one), None)) == "made"


@pytest.mark.skipif(sys.platform != "linux", reason="byte locks of open files exist on Linux")
class TestProcesses:
    def others(self, shelf: Shelf) -> list[int]:
        """Forks processes that ask for the value, and fail unless they get it."""

        def work() -> None:
            assert shelf.ask(shelf.flight()) == "made"

        return [fork(work) for _ in range(8)]

    def test_a_killed_leader_is_replaced_by_one(self, shelf: Shelf) -> None:
        def lead(stop: Callable[[], None]) -> None:
            shelf.ask(shelf.flight(), lambda: (stop(), shelf.make())[1])

        with stopped(lead, signal.SIGKILL):
            others = self.others(shelf)
        assert [wait(each) for each in others] == [0] * 8
        assert shelf.times == 1

    def test_after_a_leader_that_failed_another_makes_it(self, shelf: Shelf) -> None:
        def lead(stop: Callable[[], None]) -> None:
            def failing() -> tuple[str, str]:
                stop()
                raise CompileError("no", log="the log", source_name="k.cu")

            with pytest.raises(CompileError):
                shelf.ask(shelf.flight(), failing)

        with stopped(lead):
            others = self.others(shelf)
        assert [wait(each) for each in others] == [0] * 8
        assert shelf.times == 1

    def test_the_lock_does_not_outlive_its_process_in_a_child(self, shelf: Shelf) -> None:
        """A child that is forked while its parent compiles must not keep the parent's lock."""
        life, end = os.pipe()

        def lead(stop: Callable[[], None]) -> None:
            def slow() -> tuple[str, str]:
                if os.fork() == 0:
                    os.close(end)
                    os.read(life, 1)  # lives as long as the test
                    os._exit(0)
                stop()
                return shelf.make()

            shelf.ask(shelf.flight(), slow)

        with stopped(lead, signal.SIGKILL):
            pass
        assert shelf.ask(shelf.flight()) == "made"
        assert shelf.counts == (0, 0, 0)
        os.close(end)
        os.close(life)


def test_without_locks_each_process_makes_it(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> bool:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("kcache.util.locks._range_lock", refuse)
    one = shelf.flight()
    assert together(4, lambda: shelf.ask(one)) == ["made"] * 4
    assert shelf.times == 1
    shelf.value.unlink()
    assert shelf.ask(one) == "made"
    assert shelf.counts[2] >= 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]


class TestKeyLocks:
    def test_the_lock_of_a_key_is_where_it_is_said_to_be(self, tmp_path: Path) -> None:
        """Another implementation of the format must lock the same bytes."""
        path = tmp_path / "flight"
        mine = lock_key(str(path), KEY)
        assert mine is not None
        assert path.read_bytes() == b"kcache-flight/2\0"
        with open_own(str(path), os.O_RDWR) as file:
            offset = 16 + (int(KEY[:16], 16) >> 2)
            held = [is_locked(file, offset + at) for at in (-1, 0, 1)]
        assert held == [False, True, False]


class TestEngine:
    def test_processes_create_once(self, shelf: Shelf, tmp_path: Path) -> None:
        def create() -> Any:
            shelf.count()
            return entry(10)

        def work() -> None:
            with open_engine(tmp_path / "cache") as engine:
                assert engine.get_or_create(key(1), create) == entry(10)

        children = [fork(work) for _ in range(12)]
        assert [wait(each) for each in children] == [0] * 12
        assert shelf.times == 1
        with open_engine(tmp_path / "cache") as engine:
            stats = engine.total_stats()
        assert (stats.misses, stats.hits) == (1, 11)

    def test_an_error_of_create_reaches_every_thread(self, tmp_path: Path) -> None:
        def create() -> Any:
            raise KeyError("mine")

        with open_engine(tmp_path / "cache") as engine:
            got = together(4, lambda: engine.get_or_create(key(1), create))
            assert [repr(each) for each in got] == ["KeyError('mine')"] * 4
            assert engine.stats().misses == 4
