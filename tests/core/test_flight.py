"""Flight: one of many makes the value, whoever is killed, stopped, forked or interrupted."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from core.helpers import entry, fork, key, together, wait

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

    def flight(self, path: str | None = "", wait: float = LONG) -> Flight:
        return Flight(self.path if path == "" else path, wait=wait, counters=self.counters)

    def ask(
        self,
        flight: Flight,
        make: Make | None = None,
        *,
        key: str = KEY,
        adopt: Callable[[str], str | None] = str,
        **more: Any,
    ) -> str:
        return flight.run(key, self.look, make or self.make, adopt, **more)

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

    def make_slowly(self) -> tuple[str, str]:
        """Takes long enough that others could begin meanwhile."""
        threading.Event().wait(0.1)
        return self.make()

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


class Gate:
    """A pipe: children wait until the parent opens it, and the parent until they knock."""

    def __init__(self) -> None:
        self._wait, self._open = os.pipe()
        self._knocks, self._knock = os.pipe()

    def pass_(self) -> None:
        os.write(self._knock, b"k")
        os.read(self._wait, 1)

    def knocked(self) -> None:
        assert os.read(self._knocks, 1) == b"k"

    def open(self) -> None:
        os.write(self._open, b"o")

    def close(self) -> None:
        for fd in (self._wait, self._open, self._knocks, self._knock):
            os.close(fd)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.close()


@pytest.mark.skipif(sys.platform != "linux", reason="byte locks of open files exist on Linux")
class TestProcesses:
    def child(self, shelf: Shelf, make: Make | None = None) -> int:
        """Forks a process that asks for the value, and fails unless it gets it."""

        def work() -> None:
            assert shelf.ask(shelf.flight(), make) == "made"

        return fork(work)

    def begin(self, shelf: Shelf, gate: Gate) -> int:
        """Forks a leader that makes the value when the gate is opened."""

        def slow() -> tuple[str, str]:
            gate.pass_()
            return shelf.make()

        pid = self.child(shelf, slow)
        gate.knocked()
        return pid

    def test_a_killed_leader_is_replaced_by_one(self, shelf: Shelf, gate: Gate) -> None:
        leader = self.begin(shelf, gate)
        others = [self.child(shelf) for _ in range(8)]
        os.kill(leader, signal.SIGKILL)
        assert wait(leader) == -signal.SIGKILL
        assert [wait(each) for each in others] == [0] * 8
        assert shelf.times == 1

    def test_after_a_leader_that_failed_another_makes_it(self, shelf: Shelf, gate: Gate) -> None:
        def slow() -> None:
            def failing() -> tuple[str, str]:
                gate.pass_()
                raise CompileError("no", log="the log", source_name="k.cu")

            with pytest.raises(CompileError):
                shelf.ask(shelf.flight(), failing)

        leader = fork(slow)
        gate.knocked()
        others = [self.child(shelf) for _ in range(8)]
        gate.open()
        assert [wait(each) for each in (leader, *others)] == [0] * 9
        assert shelf.times == 1

    def test_the_lock_does_not_outlive_its_process_in_a_child(
        self, shelf: Shelf, gate: Gate
    ) -> None:
        """A child that is forked while its parent compiles must not keep the parent's lock."""
        life, end = os.pipe()

        def slow() -> tuple[str, str]:
            if os.fork() == 0:
                os.close(end)
                os.read(life, 1)  # lives as long as the test
                os._exit(0)
            gate.pass_()
            return shelf.make()

        leader = self.child(shelf, slow)
        gate.knocked()
        os.kill(leader, signal.SIGKILL)
        wait(leader)
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
