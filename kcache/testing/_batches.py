"""The contract's promises about `batch`: changes that may take effect together."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest

from kcache.testing._base import ContractBase, as_threads, key, sealed
from kcache.testing._children import PATIENCE
from kcache.testing.clock import FakeClock

__all__ = ["BatchTests"]

OLD, NEW = b"old" * 50, b"new!" * 2000


class StopError(Exception):
    """Raised in a batch by a test."""


class BatchTests(ContractBase):
    """A batch changes what it would change without one, and a failed one does no harm."""

    def test_what_a_batch_changed_is_there_after_it(self, place: Path) -> None:
        """Puts, deletes and touches of a batch are there for everybody after it."""
        clock = FakeClock()
        with self.opened(place, clock=clock) as backend:
            names = self.fill(backend, 6, clock=clock)
            with backend.batch():
                backend.delete(names[0])
                backend.put(names[1], NEW)
                self.pass_time(clock)
                backend.touch(names[2])
            self.agree(backend, place)
            assert backend.get(names[0]) is None
            assert backend.get(names[1]) == NEW
            self.order(backend.coldest(), [*names[3:], names[1], names[2]])
        if self.persistent:
            with self.opened(place, clock=clock) as backend:
                self.agree(backend, place)
                assert backend.get(names[1]) == NEW

    def test_a_batch_sees_its_own_changes(self, place: Path) -> None:
        """Within the block, `get`, `usage`, `delete`, `scan` and `coldest` know the changes."""
        with self.opened(place) as backend:
            backend.put(key(1), OLD)
            before = backend.usage()
            with backend.batch():
                stored = backend.put(key(2), NEW)
                assert backend.get(key(2)) == backend.use(key(2)) == NEW
                assert backend.usage() == (before.bytes + stored, 2)
                assert {info.key for info in backend.scan()} == {key(1), key(2)}
                assert backend.delete(key(1)) == before.bytes
                assert backend.get(key(1)) is None
                assert backend.usage() == (stored, 1)
                assert [info.key for info in backend.coldest()] == [key(2)]
                assert backend.delete(key(2)) == stored
                assert backend.usage() == (0, 0)
            self.agree(backend, place, {})

    def test_a_batch_evicts_and_puts_as_the_engine_does(self, place: Path) -> None:
        """Deleting the coldest while iterating, then putting, works within a batch."""
        clock = FakeClock()
        with self.opened(place, clock=clock) as backend:
            names = self.fill(backend, 30, clock=clock)
            for number in range(30, 40):
                with backend.batch():
                    infos = backend.coldest()
                    for _ in range(2):
                        assert backend.delete(next(infos).key) > 0
                    names = [*names[2:], key(number)]
                    backend.put(key(number), NEW)
                self.pass_time(clock)
                self.agree(backend, place)
            self.order(backend.coldest(), names)

    def test_an_exception_in_a_batch_reaches_the_caller(self, place: Path) -> None:
        """After it, all of the changes before it are there or none, and the backend works."""
        with self.opened(place) as backend:
            for number in range(3):
                before = {key(1): OLD, key(2): OLD}
                for name, value in before.items():
                    backend.put(name, value)
                with pytest.raises(StopError), backend.batch():  # noqa: PT012
                    backend.put(key(1), NEW)
                    backend.delete(key(2))
                    backend.put(key(3), NEW)
                    raise StopError
                after = {key(1): NEW, key(3): NEW}
                done = backend.get(key(3)) is not None
                self.agree(backend, place, after if done else before)
                backend.put(key(4), sealed(key(4), number, 50))
                backend.delete(key(3))
                backend.delete(key(4))

    def test_an_empty_batch_changes_nothing(self, place: Path) -> None:
        """A batch in which nothing is changed leaves everything, even if it fails."""
        with self.opened(place) as backend:
            backend.put(key(1), OLD)
            with backend.batch():
                pass
            with backend.batch():
                assert backend.get(key(1)) == OLD
            with pytest.raises(StopError), backend.batch():
                raise StopError
            self.agree(backend, place, {key(1): OLD})

    def test_batches_nest(self, place: Path) -> None:
        """The inner batch's changes are there when the outer one ends."""
        with self.opened(place) as backend:
            with backend.batch():
                backend.put(key(1), OLD)
                with backend.batch():
                    backend.put(key(1), NEW)
                    backend.put(key(2), NEW)
                assert backend.get(key(2)) == NEW
                with backend.batch():
                    backend.delete(key(1))
                backend.put(key(3), NEW)
            self.agree(backend, place, {key(2): NEW, key(3): NEW})

    def test_an_exception_in_an_inner_batch(self, place: Path) -> None:
        """If the outer batch goes on after it, the outer batch's own changes take effect."""
        with self.opened(place) as backend:
            with backend.batch():
                backend.put(key(1), OLD)
                with pytest.raises(StopError), backend.batch():  # noqa: PT012
                    backend.put(key(2), NEW)
                    raise StopError
                backend.put(key(3), NEW)
            self.agree(backend, place)
            assert backend.get(key(1)) == OLD
            assert backend.get(key(2)) in (None, NEW)
            assert backend.get(key(3)) == NEW

    def test_other_threads_proceed(self, place: Path) -> None:
        """A thread that reads and writes during another's batch ends, with it at the latest."""
        with self.opened(place) as backend:
            backend.put(key(1), OLD)
            inside, ended = threading.Event(), threading.Event()

            def batch() -> None:
                with backend.batch():
                    backend.put(key(1), NEW)
                    inside.set()
                    # Long enough for the other process to meet this batch. It may have to wait for
                    # the batch.
                    ended.wait(0.2)

            def other() -> None:
                assert inside.wait(PATIENCE)
                assert backend.get(key(1)) in (OLD, NEW)
                backend.put(key(2), NEW)
                backend.delete(key(3))
                backend.usage()
                ended.set()

            as_threads(batch, other)
            self.agree(backend, place, {key(1): NEW, key(2): NEW})

    def test_a_batch_is_of_one_thread(self, place: Path) -> None:
        """A batch that fails takes back nothing that another thread put meanwhile."""
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
                backend.put(key(2), NEW)
                ended.set()

            as_threads(batch, other)
            assert backend.get(key(2)) == NEW
            self.agree(backend, place)
            backend.put(key(3), NEW)
            self.agree(backend, place)

    def test_batches_of_many_threads(self, place: Path) -> None:
        """Batches of several threads over the same keys neither wait for ever nor miscount."""
        with self.opened(place) as backend:

            def work(number: int) -> None:
                for step in range(15):
                    with backend.batch():
                        for offset in range(3):
                            name = key((number + offset) % 4)
                            backend.put(name, sealed(name, step, 100 + number))
                        backend.delete(key((number + step) % 4))

            as_threads(*(partial(work, number) for number in range(4)))
            self.sound(backend, [key(number) for number in range(4)])
            self.agree(backend, place)
