"""The contract's promises about `batch`, and about threads: each may call every method."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from random import Random

import pytest

from kcache.backend import EntryInfo
from kcache.testing._base import PATIENCE, ContractBase, anything, as_threads, key, sealed

OLD, NEW = b"old" * 50, b"new!" * 2000
FEW = [key(number) for number in range(4)]


class StopError(Exception):
    """Raised in a batch by a test."""


class BatchTests(ContractBase):
    """A batch changes what it would change without one, and a failed one does no harm.

    Threads never see a torn or mixed value, and the count is right when they are done.
    """

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

    def test_batches_nest(self, place: Path) -> None:
        """An inner batch's changes are there when the outer one ends, even if another one fails."""
        with self.opened(place) as backend:
            with backend.batch():
                backend.put(key(1), OLD)
                with backend.batch():
                    backend.put(key(1), NEW)
                    backend.put(key(2), NEW)
                assert backend.get(key(2)) == NEW
                with pytest.raises(StopError), backend.batch():  # noqa: PT012
                    backend.put(key(3), NEW)
                    raise StopError
                backend.delete(key(1))
            self.agree(backend, place)
            assert backend.get(key(1)) is None
            assert backend.get(key(2)) == NEW
            assert backend.get(key(3)) in (None, NEW)

    def test_a_batch_is_of_one_thread(self, place: Path) -> None:
        """Other threads read and write during a batch; if it fails, their changes stay."""
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
        """Any operations at once, with one handle or several: no torn or mixed value."""
        with self.opened(place) as backend:

            def work(seed: int) -> None:
                own = self.opened(place) if self.shared and seed % 2 else nullcontext(backend)
                random = Random(seed)
                with own as handle:
                    for _ in range(60):
                        anything(handle, random, FEW, 20_000)

            as_threads(*(partial(work, seed) for seed in range(8)))
            self.sound(backend, FEW)
            self.agree(backend, place)

    def test_an_iteration_may_end_in_another_thread(self, place: Path) -> None:
        """An iterator that one thread began can be continued, and dropped, by another."""
        with self.opened(place) as backend:
            names = self.fill(backend, 20)
            for iterate in (backend.coldest, backend.scan):
                infos = iterate()
                found = [next(infos).key]
                rest: list[EntryInfo] = []
                as_threads(partial(rest.extend, infos))
                found += [info.key for info in rest]
                assert sorted(found) == sorted(names)
                dropped = [iterate()]
                next(dropped[0])
                as_threads(dropped.clear)
            backend.put(key("next"), b"next")
            self.agree(backend, place)
