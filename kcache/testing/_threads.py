"""The contract's promises about threads: every method may be called from any of them."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from random import Random

from kcache.backend import Backend, EntryInfo
from kcache.errors import BackendError
from kcache.testing._base import ContractBase, as_threads, intact, key, sealed
from kcache.testing._children import PATIENCE

__all__ = ["ThreadTests"]

FEW = [key(number) for number in range(4)]


def anything(backend: Backend, random: Random) -> None:
    """Do something to one of a few entries."""
    name = random.choice(FEW)
    choice = random.randrange(10)
    if choice < 4:
        size = random.choice((20, 300, 5000, 20_000))
        backend.put(name, sealed(name, random.getrandbits(32), size))
    elif choice < 5:
        backend.delete(name)
    elif choice < 8:
        value = backend.get(name) if choice == 5 else backend.use(name)
        assert value is None or intact(name, value)
    elif choice < 9:
        backend.touch(name)
        assert backend.usage().entries <= 3 * len(FEW)
    else:
        infos = list(backend.coldest() if random.randrange(2) else backend.scan())
        assert len({info.key for info in infos}) == len(infos) <= len(FEW)


class ThreadTests(ContractBase):
    """Threads never see a torn or mixed value, and the count is right when they are done."""

    def test_eight_threads_on_four_keys(self, place: Path) -> None:
        """Any operations at once: every value that is read is one that was put, in whole."""
        with self.opened(place) as backend:

            def work(seed: int) -> None:
                random = Random(seed)
                for _ in range(60):
                    anything(backend, random)

            as_threads(*(partial(work, seed) for seed in range(8)))
            self.sound(backend, FEW)
            self.agree(backend, place)

    def test_threads_with_a_handle_each(self, place: Path) -> None:
        """Several handles of one process are as good as one."""
        self.needs_sharing()

        def work(seed: int) -> None:
            random = Random(seed)
            with self.opened(place) as backend:
                for _ in range(30):
                    anything(backend, random)

        as_threads(*(partial(work, seed) for seed in range(4)))
        with self.opened(place) as backend:
            self.sound(backend, FEW)
            self.agree(backend, place)

    def test_a_thread_that_ends_leaves_its_work(self, place: Path) -> None:
        """After a thread has ended, its puts and uses remain, and other threads can change them."""
        clock_free = [key(f"thread {number}") for number in range(5)]
        with self.opened(place) as backend:
            for name in clock_free:

                def work(name: str = name) -> None:
                    backend.put(name, sealed(name, 1, 200))
                    backend.touch(name)

                as_threads(work)
            for name in clock_free:
                assert backend.get(name) == sealed(name, 1, 200)
                assert backend.delete(name) > 0
            self.agree(backend, place, {})

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

    def test_closing_while_threads_work(self, place: Path) -> None:
        """They go on, or get `BackendError`; nothing else, and no damage is done."""
        with self.opened(place) as backend:
            started = threading.Barrier(4)

            def work(seed: int) -> None:
                random = Random(seed)
                started.wait(PATIENCE)
                try:
                    for _ in range(40):
                        anything(backend, random)
                except BackendError:
                    pass

            def close() -> None:
                started.wait(PATIENCE)
                backend.close()

            as_threads(*(partial(work, seed) for seed in range(3)), close)
        if self.persistent:
            with self.opened(place) as backend:
                self.sound(backend, FEW)
                backend.put(FEW[0], sealed(FEW[0], 1, 100))
                assert backend.get(FEW[0]) == sealed(FEW[0], 1, 100)
                self.not_below_the_truth(backend, place)
