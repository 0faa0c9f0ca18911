"""The contract's promises about processes: shared places, fork, and kills at any instant."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random

import pytest

from kcache.backend import Backend
from kcache.testing._base import ContractBase, as_threads, key, sealed
from kcache.testing._children import Writers, run_forked, run_fresh, start, wait

__all__ = ["ProcessTests"]

NAMES = [key(number) for number in range(8)]
LARGEST = 20_000


def write(backend: Backend, random: Random) -> None:
    """Change something about one of a few entries."""
    name = random.choice(NAMES)
    choice = random.randrange(10)
    if choice < 5:
        backend.put(name, sealed(name, random.getrandbits(32), random.randrange(16, LARGEST)))
    elif choice < 7:
        backend.delete(name)
    elif choice < 8:
        with backend.batch():
            for info in backend.coldest():
                backend.delete(info.key)
                break
            backend.put(name, sealed(name, 7, 100))
    elif choice < 9:
        backend.use(name)
        backend.touch(name)
    else:
        for _ in zip(backend.coldest(), range(3), strict=False):
            backend.usage()


class ProcessTests(ContractBase):
    """Any number of processes; one that is killed at any instant harms nobody."""

    def test_processes_see_each_others_changes(self, place: Path) -> None:
        """Each process sees the other's puts and deletes through a handle that was already open."""
        self.needs_processes()
        with self.opened(place) as backend:
            backend.put(key(1), b"parent")
            backend.put(key(2), b"parent")
            assert backend.get(key(1)) == backend.use(key(2)) == b"parent"

            def work() -> None:
                with self.opened(place) as other:
                    assert other.get(key(1)) == b"parent"
                    other.put(key(1), b"child")
                    other.put(key(3), b"child")
                    other.delete(key(2))

            run_forked(work)
            self.agree(backend, place, {key(1): b"child", key(3): b"child"})

    def test_a_fresh_process_sees_everything(self, place: Path) -> None:
        """A process that was not forked (multiprocessing's spawn, another program) as well."""
        self.needs_sharing()
        if not self.persistent:
            pytest.skip("nothing persists")
        with self.opened(place) as backend:
            backend.put(key(1), b"parent")
            run_fresh(self, "write_elsewhere", str(place))
            self.agree(backend, place, {key(1): b"child", key(2): b"child"})

    def write_elsewhere(self, place: str) -> None:
        """Run in the fresh process of the test above."""
        with self.opened(Path(place)) as backend:
            assert backend.get(key(1)) == b"parent"
            assert backend.usage().entries == 1
            backend.put(key(1), b"child")
            backend.put(key(2), b"child")

    def test_writers_at_once_agree_at_the_end(self, place: Path) -> None:
        """Four processes over the same keys: no torn value, and the count is exact at the end."""
        self.needs_processes()

        def work(seed: int) -> None:
            random = Random(seed)
            with self.opened(place) as backend:
                for _ in range(40):
                    write(backend, random)
                    self.sound(backend, [random.choice(NAMES)])

        with self.opened(place) as backend:
            children = [start(partial(work, seed), 2) for seed in range(4)]
            ends = [wait(child) for child in children]
            assert ends == [0] * 4
            self.sound(backend, NAMES)
            self.agree(backend, place)
            assert list(self.leftovers(place)) == []

    # -- fork ------------------------------------------------------------------------------------

    def test_a_forked_child_goes_on_with_the_handle(self, place: Path) -> None:
        """The child uses the handle that it inherited, while the parent goes on with it."""
        self.needs_processes()
        with self.opened(place) as backend:
            backend.put(key(1), b"parent")
            backend.use(key(1))

            def work() -> None:
                for number in range(10):
                    assert backend.get(key(1)) == b"parent"
                    backend.put(key(f"child {number}"), b"child")
                    backend.touch(key(1))
                    backend.delete(key(f"child {number - 5}"))
                list(backend.coldest())

            def meanwhile() -> None:
                for number in range(10):
                    assert backend.use(key(1)) == b"parent"
                    backend.put(key(f"parent {number}"), b"parent")

            run_forked(work, meanwhile)
            children = {key(f"child {number}"): b"child" for number in range(5, 10)}
            parents = {key(f"parent {number}"): b"parent" for number in range(10)}
            self.agree(backend, place, {key(1): b"parent", **children, **parents})

    def test_a_forked_child_that_closes_the_handle(self, place: Path) -> None:
        """The parent's stays open, and so do handles that the child opens itself."""
        self.needs_processes()
        with self.opened(place) as backend:
            backend.put(key(1), b"parent")

            def work() -> None:
                backend.close()
                with self.opened(place) as own:
                    assert own.get(key(1)) == b"parent"
                    own.put(key(2), b"child")

            run_forked(work)
            backend.put(key(3), b"parent")
            expected = {key(1): b"parent", key(2): b"child", key(3): b"parent"}
            self.agree(backend, place, expected)

    def test_a_fork_beside_busy_threads(self, place: Path) -> None:
        """A child forked while other threads work in the backend is not caught in their locks."""
        self.needs_processes()
        with self.opened(place) as backend:
            done = threading.Event()

            def busy(seed: int) -> None:
                random = Random(seed)
                while not done.is_set():
                    write(backend, random)

            def child() -> None:
                self.sound(backend, NAMES)
                backend.put(key("child"), sealed(key("child"), 1, 100))
                backend.use(key("child"))
                backend.usage()
                next(backend.coldest(), None)

            def fork() -> None:
                try:
                    for _ in range(5):
                        run_forked(child)
                finally:
                    done.set()

            as_threads(fork, lambda: busy(1), lambda: busy(2))
            self.sound(backend, [*NAMES, key("child")])
            self.agree(backend, place)

    def test_a_fork_in_the_middle_of_an_iteration(self, place: Path) -> None:
        """Both parent and child can go on iterating, or begin again."""
        self.needs_processes()
        with self.opened(place) as backend:
            names = self.fill(backend, 20)
            infos = backend.coldest()
            found = [next(infos).key]

            def work() -> None:
                assert sorted(info.key for info in backend.coldest()) == sorted(names)
                backend.put(key("child"), b"child")

            run_forked(work)
            found += [info.key for info in infos]
            assert len(set(found)) == len(found)
            assert {*found} >= {*names}
            self.agree(backend, place)

    # -- kills -----------------------------------------------------------------------------------

    def test_killed_writers_leave_a_sound_place(self, place: Path) -> None:
        """After any kill: no torn value, no lock left, `usage` not below the truth.

        The handle that was open all the while goes on, and the place can be opened at once.
        """
        self.needs_processes()

        def work(seed: int, report: Callable[[], object]) -> None:
            random = Random(seed)
            with self.opened(place) as backend:
                while True:
                    write(backend, random)
                    report()

        self._kill(place, Writers(work, count=3, seed=1))

    def test_writers_killed_in_a_batch_leave_a_sound_place(self, place: Path) -> None:
        """A kill in the middle of a batch leaves all of it, some of it or nothing, but no harm."""
        self.needs_processes()

        def work(seed: int, report: Callable[[], object]) -> None:
            random = Random(seed)
            with self.opened(place) as backend:
                while True:
                    with backend.batch():
                        for _ in range(8):
                            write(backend, random)
                            report()

        self._kill(place, Writers(work, count=2, seed=2))

    def _kill(self, place: Path, writers: Writers) -> None:
        with self.opened(place) as lasting:
            for _ in range(self.kills):
                writers.kill_some()
                run_forked(lambda: self._check_after_kill(place))  # hangs if a lock is left
                run_forked(lambda: self._check_handle(lasting, place))
                self._check_handle(lasting, place)

    def _check_after_kill(self, place: Path) -> None:
        with self.opened(place) as backend:
            self._check_handle(backend, place)
            assert list(backend.check()) == []

    def _check_handle(self, backend: Backend, place: Path) -> None:
        self.not_below_the_truth(backend, place)
        self.sound(backend, NAMES)
        for name in NAMES:
            backend.put(name, sealed(name, 1, 100))
            assert backend.get(name) == sealed(name, 1, 100)
        self.not_below_the_truth(backend, place)
        assert {info.key for info in backend.coldest()} == {*NAMES}
        # Every entry was written again, so counts that a killed writer left uncertain are counted
        # again.
        self.agree(backend, place)
        assert list(self.leftovers(place)) == []

    def test_a_process_killed_while_it_reads(self, place: Path) -> None:
        """A reader that is killed with iterations and a batch open keeps nobody from anything."""
        self.needs_processes()
        with self.opened(place) as backend:
            names = self.fill(backend, 30)
            reading, writing = os.pipe()
            try:

                def work() -> None:
                    with ExitStack() as stack:
                        other = stack.enter_context(self.opened(place))
                        iterations = [other.coldest(), other.scan()]
                        for infos in iterations:
                            next(infos)
                        stack.enter_context(other.batch())
                        other.get(names[0])
                        os.write(writing, b".")
                        signal.pause()

                child = start(work, 2)
                os.close(writing)
                writing = -1
                ready = os.read(reading, 1)
                os.kill(child, signal.SIGKILL)
                wait(child)
            finally:
                os.close(reading)
                if writing >= 0:
                    os.close(writing)
            assert ready, "the reader has failed"
            for name in names:
                assert backend.delete(name) > 0
            self.agree(backend, place, {})
            run_forked(lambda: self._check_after_kill(place))
