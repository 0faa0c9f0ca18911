"""Flight: one of many makes the value, whoever is killed, stopped, forked or interrupted."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from core.helpers import entry, fork, key, wait

from kcache import CompileError, open_engine
from kcache.engine import key_locks as keylocks_module
from kcache.engine.key_locks import KeyLocks
from kcache.engine.single_flight import Busy, Flight, Made, Work
from kcache.engine.stats import Counters
from kcache.util import locks as byte_locks
from kcache.util.open_file import OwnFile, open_own

KEY = key("flight")
LONG = 60.0


class Shelf:
    """A value in a file, and how often it was made: one byte per making, whoever makes it."""

    def __init__(self, folder: Path) -> None:
        self.value = folder / "value"
        self.made = folder / "made"
        self.made.touch()

    def look(self) -> str | None:
        try:
            return self.value.read_text()
        except FileNotFoundError:
            return None

    def make(self) -> Made[str]:
        self.count()
        self.keep("made")
        return Made("made", reusable=True, stored=True)

    def keep(self, text: str) -> None:
        temporary = self.value.with_suffix(f".{os.getpid()}")
        temporary.write_text(text)
        temporary.rename(self.value)

    def count(self) -> None:
        with self.made.open("ab", buffering=0) as file:
            file.write(b".")

    @property
    def times(self) -> int:
        return self.made.stat().st_size

    def work(self, make: Callable[[], Made[str]] | None = None) -> Work[str]:
        return Work(self.look, make or self.make, lambda value: value)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "flight")


def flight(path: str | None, wait: float = LONG) -> Flight[str]:
    return Flight(path, wait=wait, counters=Counters())


def counts(flight: Flight[Any]) -> tuple[int, int, int]:
    stats = flight._count.__self__.snapshot()  # type: ignore[attr-defined]
    return (stats.coalesced, stats.wait_timeouts, stats.unlocked)


def threads(count: int, work: Callable[[], object]) -> list[object]:
    """Runs `work` in threads that start together; returns what each returned or raised."""
    gate = threading.Barrier(count)
    results: list[object] = []

    def run() -> None:
        gate.wait(LONG)
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    workers = [threading.Thread(target=run) for _ in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(LONG)
    return results


class Slow:
    """A way to make a value that says when it has begun, and ends when it is let."""

    def __init__(self, shelf: Shelf, end: Callable[[], Made[str]] | None = None) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self._shelf = shelf
        self._end = end

    def __call__(self) -> Made[str]:
        self.begun.set()
        assert self.go.wait(LONG)
        return self._end() if self._end is not None else self._shelf.make()


def joined(flight: Flight[str], slow: Slow, work: Callable[[], object]) -> list[object]:
    """Has one thread lead by `slow`, and four join it by `work`, before it may end."""
    results: list[object] = []
    ready = threading.Barrier(5)

    def lead() -> None:
        with suppress(Exception, KeyboardInterrupt):
            flight.run(KEY, Work(lambda: None, slow, lambda value: value))

    def join() -> None:
        ready.wait(LONG)
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    leader = threading.Thread(target=lead)
    leader.start()
    assert slow.begun.wait(LONG)
    others = [threading.Thread(target=join) for _ in range(4)]
    for other in others:
        other.start()
    ready.wait(LONG)
    while flight._calls[KEY].done._cond._waiters.__len__() < 4:  # type: ignore[attr-defined]
        os.sched_yield()
    slow.go.set()
    for thread in (leader, *others):
        thread.join(LONG)
    return results


@pytest.mark.parametrize("between_processes", [False, True])
class TestThreads:
    @pytest.fixture
    def one(self, path: str, between_processes: bool) -> Iterator[Flight[str]]:
        made = flight(path if between_processes else None)
        yield made
        made.close()

    def test_one_makes_and_all_get_it(self, one: Flight[str], shelf: Shelf) -> None:
        assert threads(16, lambda: one.run(KEY, shelf.work())) == ["made"] * 16
        assert shelf.times == 1

    def test_those_who_wait_look_again(self, one: Flight[str], shelf: Shelf) -> None:
        got = joined(one, Slow(shelf), lambda: one.run(KEY, shelf.work()))
        assert got == ["made"] * 4
        assert (shelf.times, counts(one)) == (1, (4, 0, 0))

    def test_what_could_not_be_stored_is_shared(self, one: Flight[str], shelf: Shelf) -> None:
        slow = Slow(shelf, lambda: Made("lost", reusable=True, stored=False))
        assert joined(one, slow, lambda: one.run(KEY, shelf.work())) == ["lost"] * 4
        assert shelf.times == 0

    def test_what_is_no_good_for_who_waits_is_made_again_once(
        self, one: Flight[str], shelf: Shelf
    ) -> None:
        slow = Slow(shelf, lambda: Made("stale", reusable=True, stored=False))
        work = Work(shelf.look, shelf.make, lambda value: None)
        assert joined(one, slow, lambda: one.run(KEY, work)) == ["made"] * 4
        assert shelf.times == 1

    def test_what_must_not_be_reused_is_made_by_each(self, one: Flight[str], shelf: Shelf) -> None:
        def unique() -> Made[str]:
            shelf.count()
            return Made("own", reusable=False, stored=False)

        together = threading.Barrier(4)

        def mine() -> Made[str]:
            together.wait(LONG)  # all at the same time, not one after the other
            return unique()

        work = Work(shelf.look, mine, lambda value: value)
        got = joined(one, Slow(shelf, unique), lambda: one.run(KEY, work))
        assert (got, shelf.times) == (["own"] * 4, 5)

    def test_an_error_reaches_all_and_the_next_tries_again(
        self, one: Flight[str], shelf: Shelf
    ) -> None:
        def fail() -> Made[str]:
            raise CompileError("no", log="the log", source_name="k.cu")

        got = joined(one, Slow(shelf, fail), lambda: one.run(KEY, shelf.work()))
        assert [str(each) for each in got] == ["no"] * 4
        assert all(isinstance(e, CompileError) and e.log == "the log" for e in got)
        assert len({id(each) for each in got}) == 4
        assert one.run(KEY, shelf.work()) == "made"

    @pytest.mark.parametrize("place", ["here", "there"])
    def test_an_error_that_may_be_old_or_of_another_place_is_not_shared(
        self, one: Flight[str], shelf: Shelf, place: str
    ) -> None:
        def fail() -> Made[str]:
            raise CompileError("old")

        work = shelf.work()._replace(timeless=place == "there", location=place)
        assert joined(one, Slow(shelf, fail), lambda: one.run(KEY, work)) == ["made"] * 4
        assert shelf.times == 1

    def test_a_copied_error_says_the_same(self, one: Flight[str], shelf: Shelf) -> None:
        class SaidOnceError(Exception):
            def __init__(self, code: int) -> None:
                super().__init__(f"failed with {code}")
                self.code = code

        def fail() -> Made[str]:
            raise SaidOnceError(3)

        got = joined(one, Slow(shelf, fail), lambda: one.run(KEY, shelf.work()))
        assert [(str(e), e.code) for e in got] == [("failed with 3", 3)] * 4  # type: ignore[attr-defined]

    def test_an_error_that_cannot_be_copied(self, one: Flight[str], shelf: Shelf) -> None:
        class OddError(Exception):
            def __init__(self, *, needed: int) -> None:
                super().__init__(needed)

        def fail() -> Made[str]:
            raise OddError(needed=1)

        got = joined(one, Slow(shelf, fail), lambda: one.run(KEY, shelf.work()))
        assert [type(each) for each in got] == [OddError] * 4

    def test_an_interrupted_leader_is_replaced(self, one: Flight[str], shelf: Shelf) -> None:
        def interrupt() -> Made[str]:
            raise KeyboardInterrupt

        slow = Slow(shelf, interrupt)
        got = joined(one, slow, lambda: one.run(KEY, shelf.work()))
        assert (got, shelf.times) == (["made"] * 4, 1)

    def test_who_waits_too_long_goes_on_alone(self, shelf: Shelf, path: str, between_processes):
        one = flight(path if between_processes else None, wait=0.01)
        slow = Slow(shelf)
        leader = threading.Thread(target=lambda: one.run(KEY, shelf.work(slow)))
        leader.start()
        assert slow.begun.wait(LONG)
        assert one.run(KEY, shelf.work()) == "made"
        # Somebody has made it by now, and who comes to the end of a wait looks.
        assert one.attempt(KEY, shelf.work(), Busy(-1e9, 0)) == "made"
        assert (shelf.times, counts(one)) == (1, (1, 2, 0))
        slow.go.set()
        leader.join(LONG)

    def test_busy_instead_of_a_wait(self, one: Flight[str], shelf: Shelf) -> None:
        slow = Slow(shelf)
        leader = threading.Thread(target=lambda: one.run(KEY, shelf.work(slow)))
        leader.start()
        assert slow.begun.wait(LONG)
        busy = one.attempt(KEY, shelf.work())
        assert isinstance(busy, Busy)
        assert one.attempt(KEY, shelf.work(), busy) == busy
        assert one.attempt(key("other"), Work(lambda: None, shelf.make, str)) == "made"
        slow.go.set()
        leader.join(LONG)
        assert one.attempt(KEY, shelf.work(), busy) == "made"
        assert (shelf.times, counts(one)[0]) == (2, 1)

    def test_asked_for_while_making_it(self, one: Flight[str], shelf: Shelf) -> None:
        outer = Work(lambda: None, lambda: Made(one.run(KEY, shelf.work()), True, True), str)
        assert one.run(KEY, outer) == "made"

    def test_nothing_is_kept_of_a_flight_that_is_over(self, one: Flight[str], shelf: Shelf) -> None:
        for number in range(100):
            one.run(key(number), Work(lambda: None, shelf.make, str))
        assert not one._calls
        assert one._locks is None or not one._locks._held


def child(path: str, shelf: Shelf, make: Callable[[], Made[str]] | None = None, **kw: float) -> int:
    """Forks a process that asks for the value, and fails unless it gets it."""

    def work() -> None:
        assert flight(path, **kw).run(KEY, shelf.work(make)) in ("made", "own")

    return fork(work)


class Gate:
    """A pipe: children wait until the parent opens it, and the parent until they knock."""

    def __init__(self) -> None:
        self._wait, self._open = os.pipe()
        self._knocks, self._knock = os.pipe()

    def pass_(self) -> None:
        os.write(self._knock, b"k")
        os.read(self._wait, 1)

    def knocked(self, times: int = 1) -> None:
        for _ in range(times):
            assert os.read(self._knocks, 1) == b"k"

    def open(self) -> None:
        os.write(self._open, b"o" * 16)  # one for each who passes

    def close(self) -> None:
        for fd in (self._wait, self._open, self._knocks, self._knock):
            with suppress(OSError):
                os.close(fd)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.close()


@pytest.mark.skipif(sys.platform != "linux", reason="byte locks of open files exist on Linux")
class TestProcesses:
    def test_one_makes_and_all_get_it(self, path: str, shelf: Shelf) -> None:
        children = [child(path, shelf) for _ in range(16)]
        assert [wait(each) for each in children] == [0] * 16
        assert shelf.times == 1

    def begin(self, path: str, shelf: Shelf, gate: Gate) -> int:
        """Forks a leader that makes the value when the gate is opened."""

        def slow() -> Made[str]:
            shelf.count()
            gate.pass_()
            shelf.keep("made")
            return Made("made", reusable=True, stored=True)

        pid = child(path, shelf, slow)
        gate.knocked()
        return pid

    def test_a_killed_leader_is_replaced_by_one(self, path: str, shelf: Shelf, gate: Gate) -> None:
        leader = self.begin(path, shelf, gate)
        others = [child(path, shelf) for _ in range(8)]
        os.kill(leader, signal.SIGKILL)
        assert wait(leader) == -signal.SIGKILL
        assert [wait(each) for each in others] == [0] * 8
        assert shelf.times == 2

    def test_a_stopped_leader_is_not_waited_for_longer_than_said(
        self, path: str, shelf: Shelf, gate: Gate
    ) -> None:
        leader = self.begin(path, shelf, gate)
        os.kill(leader, signal.SIGSTOP)
        one = flight(path, wait=0.05)
        assert one.run(KEY, shelf.work()) == "made"
        assert counts(one) == (0, 1, 0)
        os.kill(leader, signal.SIGCONT)
        gate.open()
        assert wait(leader) == 0

    def test_the_lock_does_not_outlive_its_process_in_a_child(
        self, path: str, shelf: Shelf, gate: Gate
    ) -> None:
        """A child that is forked while its parent compiles must not keep the parent's lock."""
        life, end = os.pipe()

        def slow() -> Made[str]:
            if os.fork() == 0:
                os.close(end)
                os.read(life, 1)  # lives as long as the test
                os._exit(0)
            gate.pass_()
            return shelf.make()

        leader = child(path, shelf, slow)
        gate.knocked()
        os.kill(leader, signal.SIGKILL)
        wait(leader)
        one = flight(path)
        assert one.run(KEY, shelf.work()) == "made"
        assert counts(one) == (0, 0, 0)
        os.close(end)
        os.close(life)

    def test_a_forked_child_does_not_wait_for_its_parents_threads(
        self, path: str, shelf: Shelf
    ) -> None:
        one = flight(path, wait=LONG)
        slow = Slow(shelf)
        leader = threading.Thread(target=lambda: one.run(KEY, shelf.work(slow)))
        leader.start()
        assert slow.begun.wait(LONG)

        def work() -> None:
            assert isinstance(
                one.attempt(KEY, shelf.work()), Busy
            )  # the parent's lock, not its thread
            assert one.run(key("other"), Work(lambda: None, shelf.make, str)) == "made"

        assert wait(fork(work)) == 0
        assert KeyLocks(path).acquire(KEY) is False  # the child's end released nothing
        slow.go.set()
        leader.join(LONG)

    @pytest.mark.parametrize("left", ["nothing stored", "not to be stored", "an error"])
    def test_nobody_queues_behind_a_leader_that_leaves_nothing(
        self, path: str, shelf: Shelf, gate: Gate, left: str
    ) -> None:
        """Sixteen processes with a broken kernel must not fail one after the other."""

        def unstored() -> Made[str]:
            if left == "an error":
                raise KeyError
            return Made("own", reusable=left == "nothing stored", stored=False)

        def slow() -> Made[str]:
            gate.pass_()
            return unstored()

        together = Gate()

        def beside() -> Made[str]:
            together.pass_()
            return unstored()

        waiting = Gate()

        def wait_and_make() -> None:
            one = flight(path)
            assert one._locks is not None
            acquire = one._locks.acquire
            told = []

            def telling(key: str) -> bool:
                taken = acquire(key)
                if not taken and not told:
                    told.append(1)
                    os.write(waiting._knock, b"k")
                return taken

            one._locks.acquire = telling  # type: ignore[method-assign]
            run(one, beside)

        def run(one: Flight[str], make: Callable[[], Made[str]]) -> None:
            if left == "an error":
                with pytest.raises(KeyError):
                    one.run(KEY, shelf.work(make))
            else:
                assert one.run(KEY, shelf.work(make)) == "own"

        leader = fork(lambda: run(flight(path), slow))
        gate.knocked()
        others = [fork(wait_and_make) for _ in range(3)]
        waiting.knocked(3)  # all three have found the lock held
        gate.open()
        together.knocked(3)  # all three are making it at the same time
        together.open()
        together.close()
        waiting.close()
        assert [wait(each) for each in (leader, *others)] == [0] * 4
        # Earlier flights do not matter to a later request.
        later = [child(path, shelf) for _ in range(8)]
        assert [wait(each) for each in later] == [0] * 8
        assert shelf.times == 1

    def test_old_failures_do_not_matter_when_a_leader_is_killed(
        self, path: str, shelf: Shelf, gate: Gate
    ) -> None:
        def fail() -> Made[str]:
            raise KeyError

        for _ in range(3):
            with pytest.raises(KeyError):
                flight(path).run(KEY, shelf.work(fail))
        self.test_a_killed_leader_is_replaced_by_one(path, shelf, gate)

    def test_who_waits_for_a_stopped_leader_sees_what_another_stored(
        self, path: str, shelf: Shelf, gate: Gate
    ) -> None:
        leader = self.begin(path, shelf, gate)
        os.kill(leader, signal.SIGSTOP)
        patient = child(path, shelf)
        assert flight(path, wait=0.05).run(KEY, shelf.work()) == "made"
        assert wait(patient) == 0  # long before its own wait of a minute ends
        assert shelf.times == 2
        os.kill(leader, signal.SIGKILL)
        wait(leader)

    def test_asked_for_by_way_of_another_object_while_making_it(
        self, path: str, shelf: Shelf
    ) -> None:
        one, two = flight(path), flight(path)
        outer = Work(lambda: None, lambda: Made(two.run(KEY, shelf.work()), True, True), str)
        assert one.run(KEY, outer) == "made"
        one.close()
        two.close()

    def test_a_child_keeps_no_file_that_another_thread_was_using(
        self, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inside, go = threading.Event(), threading.Event()

        def slow_lock(file: OwnFile, start: int) -> bool:
            inside.set()
            assert go.wait(LONG)
            return byte_locks.lock(file, start)

        monkeypatch.setattr(keylocks_module, "lock", slow_lock)
        locks = KeyLocks(path)
        thread = threading.Thread(target=lambda: locks.acquire(KEY))
        thread.start()
        assert inside.wait(LONG)

        def work() -> None:
            fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
            assert path not in [os.readlink(fd) for fd in fds if os.path.lexists(fd)]

        assert wait(fork(work)) == 0
        go.set()
        thread.join(LONG)

    def test_counting_never_writes_into_another_file(
        self, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The file may be let go of by another thread in the middle of it."""
        locks = KeyLocks(path)
        foreign = []
        raw = keylocks_module._raw

        def meanwhile(key: str) -> bytes:
            locks.close()
            foreign.append(open(tmp_path / f"foreign{len(foreign)}", "w+b"))  # noqa: SIM115
            return raw(key)

        locks.end(KEY)
        monkeypatch.setattr(keylocks_module, "_raw", meanwhile)
        locks.end(KEY)
        monkeypatch.undo()
        for file in foreign:
            assert file.read() == b""
            file.close()
        assert locks.ends(KEY) == 2

    def test_a_removed_lock_file_is_made_again(self, path: str, shelf: Shelf) -> None:
        one = flight(path)
        one.run(KEY, shelf.work())
        os.unlink(path)
        assert one.run(key(2), Work(lambda: None, shelf.make, str)) == "made"
        assert os.path.exists(path)

    def test_it_leaves_one_small_file(self, path: str, shelf: Shelf, tmp_path: Path) -> None:
        one = flight(path)
        for number in range(200):
            made = Made("own", reusable=True, stored=False)
            one.run(key(number), Work(lambda: None, lambda made=made: made, str))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["flight", "made"]
        assert os.path.getsize(path) <= 8192
        assert os.stat(path).st_mode & 0o777 == 0o600

    def test_a_link_is_not_followed(self, path: str, shelf: Shelf, tmp_path: Path) -> None:
        (tmp_path / "target").write_text("mine")
        os.symlink(tmp_path / "target", path)
        one = flight(path)
        assert one.run(KEY, shelf.work()) == "made"
        assert counts(one) == (0, 0, 1)
        assert (tmp_path / "target").read_text() == "mine"

    def test_junk_in_the_lock_file(self, path: str, shelf: Shelf) -> None:
        Path(path).write_bytes(bytes.fromhex(KEY[:30]) + b"\xff" + os.urandom(20_000))
        assert flight(path).run(KEY, shelf.work()) == "made"


class TestWithoutLocks:
    def test_in_a_directory_that_is_gone(self, shelf: Shelf, tmp_path: Path, caplog) -> None:
        one = flight(str(tmp_path / "gone/flight"))
        assert one.run(KEY, shelf.work()) == "made"
        shelf.value.unlink()
        assert one.run(KEY, shelf.work()) == "made"
        assert counts(one) == (0, 0, 2)
        assert [record.levelname for record in caplog.records] == ["WARNING"]

    def test_where_the_file_system_has_none(
        self, path: str, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object, **__: object) -> bool:
            raise OSError(errno.ENOLCK, "no locks")

        monkeypatch.setattr("kcache.util.locks._range_lock", refuse)
        one = flight(path)
        assert threads(4, lambda: one.run(KEY, shelf.work())) == ["made"] * 4
        assert shelf.times == 1
        assert counts(one)[2] >= 1
        one.close()


@pytest.fixture(params=[True, False], ids=["bytes", "files"])
def locks(request: pytest.FixtureRequest, path: str) -> Callable[[], KeyLocks]:
    if request.param and sys.platform != "linux":
        pytest.skip("byte locks of open files exist on Linux")
    return lambda: KeyLocks(path, byte_locks=request.param)


class TestKeyLocks:
    def test_excludes_others_until_released(self, locks: Callable[[], KeyLocks]) -> None:
        one, two = locks(), locks()
        assert one.acquire(KEY)
        assert not two.acquire(KEY)
        two.release(KEY)  # not its own: nothing happens
        assert not two.acquire(KEY)
        one.release(KEY)
        assert two.acquire(KEY)
        two.release(KEY)

    def test_goes_with_its_process(self, locks: Callable[[], KeyLocks], gate: Gate) -> None:
        def work() -> None:
            held = locks()
            assert held.acquire(KEY)
            gate.pass_()

        holder = fork(work)
        gate.knocked()
        other = locks()
        assert not other.acquire(KEY)
        os.kill(holder, signal.SIGKILL)
        wait(holder)
        assert other.acquire(KEY)

    def test_a_child_releases_nothing_of_its_parent(self, locks: Callable[[], KeyLocks]) -> None:
        one = locks()
        assert one.acquire(KEY)
        assert wait(fork(one.after_fork)) == 0
        assert not locks().acquire(KEY)
        one.release(KEY)

    def test_closing_releases_nothing_that_is_held(self, locks: Callable[[], KeyLocks]) -> None:
        one, two = locks(), locks()
        assert one.acquire(KEY)
        one.close()
        assert not two.acquire(KEY)
        one.release(KEY)
        assert two.acquire(KEY)

    def test_ends_are_counted_by_key(self, locks: Callable[[], KeyLocks]) -> None:
        one, two = locks(), locks()
        assert one.ends(KEY) == 0
        last = 0
        for _ in range(300):
            one.end(KEY)
            assert two.ends(KEY) not in (0, last)
            last = two.ends(KEY)
        assert two.ends(key("another")) == 0


def test_the_lock_of_a_key_is_where_it_is_said_to_be(path: str) -> None:
    """Another implementation of the format must lock the same bytes."""
    one = KeyLocks(path, byte_locks=True)
    assert one.acquire(KEY)
    with open_own(path, os.O_RDWR) as file:
        offset = 8192 + (int(KEY[:16], 16) >> 2)
        held = [byte_locks.is_locked(file, offset + at) for at in (-1, 0, 1)]
    assert held == [False, True, False]
    assert keylocks_module._TABLE == 8192


class TestEngine:
    def test_threads_create_once(self, tmp_path: Path) -> None:
        made = []

        def create() -> Any:
            made.append(1)
            return entry(10)

        with open_engine(tmp_path / "cache") as engine:
            got = threads(16, lambda: engine.get_or_create(key(1), create))
            stats = engine.stats()
        assert got == [entry(10)] * 16
        assert (len(made), stats.misses, stats.hits, stats.puts) == (1, 1, 15, 1)

    def test_processes_create_once(self, tmp_path: Path) -> None:
        made = Shelf(tmp_path)

        def work() -> None:
            def create() -> Any:
                made.count()
                return entry(10)

            with open_engine(tmp_path / "cache") as engine:
                assert engine.get_or_create(key(1), create) == entry(10)

        children = [fork(work) for _ in range(12)]
        assert [wait(each) for each in children] == [0] * 12
        assert made.times == 1
        with open_engine(tmp_path / "cache") as engine:
            stats = engine.total_stats()
        assert (stats.misses, stats.hits) == (1, 11)

    def test_an_error_of_create_reaches_every_thread(self, tmp_path: Path) -> None:
        gate = threading.Barrier(4)

        def create() -> Any:
            raise KeyError("mine")

        def ask() -> Any:
            gate.wait(LONG)
            return engine.get_or_create(key(1), create)

        with open_engine(tmp_path / "cache") as engine:
            got = threads(4, ask)
            assert [repr(each) for each in got] == ["KeyError('mine')"] * 4
            assert engine.get_or_create(key(1), lambda: entry(5)) == entry(5)
