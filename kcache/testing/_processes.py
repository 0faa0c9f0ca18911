"""ProcessTests: tests what a backend promises about batches, threads, forks and kills."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from random import Random

import pytest

from kcache.backend import Backend
from kcache.errors import BackendError
from kcache.testing._base import (
    PATIENCE,
    ContractBase,
    StopError,
    anything,
    as_threads,
    key,
    kill_writers,
    run_forked,
    sealed,
)

NAMES = [key(number) for number in range(8)]
LARGEST = 20_000
NEW = b"new!" * 2000


class ProcessTests(ContractBase):
    """Tests that threads and processes may use a place at the same time.

    None of them reads a torn or mixed value, and `usage` is right when they have finished. A
    process that is killed does no harm.
    """

    def test_a_batch_is_of_one_thread(self, place: Path) -> None:
        """If a batch fails, changes that other threads made at the same time stay."""
        with self.opened(place) as backend:
            inside, ended = threading.Event(), threading.Event()

            def batch() -> None:
                with pytest.raises(StopError), backend.batch():  # noqa: PT012
                    backend.put(key(1), NEW)
                    inside.set()
                    ended.wait(0.2)
                    raise StopError

            def other() -> None:
                assert inside.wait(PATIENCE)
                backend.get(key(1))
                backend.put(key(2), NEW)
                backend.delete(key(3))
                backend.usage()
                ended.set()

            as_threads(batch, other)
            assert backend.get(key(2)) == NEW
            self.agree(backend, place)
            backend.put(key(3), NEW)
            self.agree(backend, place)

    # -- threads -----------------------------------------------------------------------------------

    def test_eight_threads_on_four_keys(self, place: Path) -> None:
        """Simultaneous operations, on one handle or several, yield no torn or mixed value."""
        with self.opened(place) as backend:

            def work(seed: int) -> None:
                own = self.opened(place) if self.shared and seed % 2 else nullcontext(backend)
                random = Random(seed)
                with own as handle:
                    for _ in range(60):
                        anything(handle, random, NAMES[:4], 20_000)

            as_threads(*(partial(work, seed) for seed in range(8)))
            self.sound(backend, NAMES[:4])
            self.agree(backend, place)

    def test_an_iteration_may_end_in_another_thread(self, place: Path) -> None:
        """An iteration that one thread began can be continued, and ended, by another thread.

        Each of two simultaneous iterations yields every entry.
        """
        with self.opened(place) as backend:
            names = self.fill(backend, 20)
            for iterate in (backend.coldest, backend.scan):
                both = zip(iterate(), iterate(), strict=True)
                found = [next(both)]
                as_threads(partial(found.extend, both))
                for infos in zip(*found, strict=True):
                    assert sorted(info.key for info in infos) == sorted(names)
                dropped = [iterate()]
                next(dropped[0])
                as_threads(dropped.clear)
            backend.put(key("next"), b"next")
            self.agree(backend, place)

    # -- fork ------------------------------------------------------------------------------------

    def test_a_forked_child_goes_on_with_the_handle(self, place: Path) -> None:
        """A child can use and close a handle that it inherited; the parent can still use its own.

        Each process finds the puts and deletes of the other one through its open handle. The parent
        can continue an iteration that it began before the fork.
        """
        self.needs("shared")
        with self.opened(place) as backend:
            names = self.fill(backend, 4)
            infos = backend.coldest()
            found = [next(infos).key]

            def work(who: str) -> None:
                for number in range(10):
                    assert backend.use(names[0]) == sealed(names[0], 0, 100)
                    backend.put(key(f"{who} {number}"), who.encode())
                    backend.delete(key(f"{who} {number - 5}"))

            def child() -> None:
                work("child")
                list(backend.coldest())
                backend.close()
                with self.opened(place) as own:
                    own.put(names[1], b"child")
                    own.delete(names[2])

            run_forked(child, lambda: work("parent"))
            found += [info.key for info in infos]
            assert len(set(found)) == len(found)
            assert names[3] in found
            kept = {name: sealed(name, number, 100) for number, name in enumerate(names)}
            del kept[names[2]]
            both = [(who, number) for who in ("child", "parent") for number in range(5, 10)]
            new = {key(f"{who} {number}"): who.encode() for who, number in both}
            self.agree(backend, place, {**kept, **new, names[1]: b"child"})

    def test_a_fork_beside_busy_threads(self, place: Path) -> None:
        """A child that is forked while other threads use the backend does not wait for them."""
        self.needs("shared")
        with self.opened(place) as backend:
            done = threading.Event()

            def busy(seed: int) -> None:
                random = Random(seed)
                while not done.is_set():
                    anything(backend, random, NAMES, LARGEST)

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

    # -- kills -----------------------------------------------------------------------------------

    def test_killed_writers_leave_a_sound_place(self, place: Path) -> None:
        """After writers are killed, no value is torn, no lock is left, and `usage` is not too low.

        A handle that was open all the time still works, and the place can be opened at once. A kill
        in the middle of a batch may leave any number of the batch's changes. The writers are killed
        in the middle of iterations, too.
        """
        self.needs("shared")

        def work(batched: bool, seed: int, report: Callable[[], object]) -> None:
            random = Random(seed)
            with self.opened(place) as backend:
                iterations = [backend.coldest(), backend.scan()]
                while all(next(infos, True) for infos in iterations):
                    # The wait for other processes is limited, and may time out on a busy machine.
                    with suppress(BackendError), backend.batch() if batched else nullcontext():
                        for _ in range(8):
                            anything(backend, random, NAMES, LARGEST)
                            report()

        alone = partial(kill_writers, partial(work, False), 3, Random(1))
        batched = partial(kill_writers, partial(work, True), 2, Random(2))
        with self.opened(place) as opened_before:
            for kill in (alone, batched) * self.kills:
                kill()
                run_forked(lambda: self._check_after_kill(place))  # hangs if a lock is left
                run_forked(lambda: self._check_handle(opened_before, place))
                self._check_handle(opened_before, place)

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
        # Every entry was written again, which corrects counts that a killed writer left uncertain.
        self.agree(backend, place)
        assert list(self.leftovers(place)) == []
