"""The contract's promises about size: what `usage` says, whoever writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kcache.errors import BackendError
from kcache.testing._base import ContractBase, key, sealed, work_of
from kcache.testing._children import run_forked

__all__ = ["UsageTests"]


class UsageTests(ContractBase):
    """`usage` is what the medium holds, counts everybody, and is never below the truth."""

    def test_usage_follows_every_operation(self, place: Path) -> None:
        """After each operation `usage` is what a look at the medium adds up to."""
        with self.opened(place) as backend:
            self.agree(backend, place, {})
            for size in (0, 1, 100, 4096, 9000):
                backend.put(key(size), bytes(size))
                self.agree(backend, place)
            for size in (9000, 0, 50):  # longer, shorter, about the same
                backend.put(key(100), bytes(size))
                self.agree(backend, place)
            for act in (backend.touch, backend.use, backend.get):
                act(key(100))
                self.agree(backend, place)
            list(backend.coldest())
            list(backend.scan())
            self.agree(backend, place)
            for size in (4096, 4096, 0, 1):
                backend.delete(key(size))
                self.agree(backend, place)

    def test_usage_counts_other_handles(self, place: Path) -> None:
        """Two handles that write by turns both see the sum."""
        self.needs_sharing()
        with self.opened(place) as first, self.opened(place) as second:
            for number in range(6):
                writer, other = (first, second) if number % 2 else (second, first)
                writer.put(key(number), bytes(1000 * number))
                other.delete(key(number - 3))
                self.agree(first, place)
                self.agree(second, place)

    def test_usage_counts_other_processes(self, place: Path) -> None:
        """`usage` counts writes and deletes of another process at once."""
        self.needs_processes()
        with self.opened(place) as backend:
            backend.put(key(1), bytes(3000))
            backend.put(key(2), bytes(300))

            def work() -> None:
                with self.opened(place) as other:
                    self.agree(other, place)
                    other.put(key(3), bytes(5000))
                    other.put(key(1), bytes(10))
                    other.delete(key(2))
                    self.agree(other, place)

            run_forked(work)
            self.agree(backend, place, {key(1): bytes(10), key(3): bytes(5000)})

    def test_usage_is_never_below_the_truth_while_others_put(self, place: Path) -> None:
        """At any instant `usage` is at least what the medium held a moment before."""
        self.needs_processes()
        with self.opened(place) as backend:
            watched = 0

            def work(writer: int) -> None:
                with self.opened(place) as other:
                    for number in range(40):
                        other.put(key(f"{writer} {number}"), bytes(10 + 40 * number))

            def watch() -> None:
                nonlocal watched
                while len(self.look(place)) < 80 and watched < 20_000:
                    self.not_below_the_truth(backend, place)
                    watched += 1

            def both() -> None:
                run_forked(lambda: work(1), lambda: run_forked(lambda: work(2)))

            run_forked(both, watch)
            self.agree(backend, place)
            assert len(self.look(place)) == 80

    def test_usage_is_never_below_the_truth_while_others_delete(self, place: Path) -> None:
        """At any instant `usage` is at least what the medium holds a moment later."""
        self.needs_processes()
        with self.opened(place) as backend:
            names = self.fill(backend, 80, size=500)

            def work() -> None:
                with self.opened(place) as other:
                    for name in names:
                        assert other.delete(name) > 0

            def watch() -> None:
                held = dict.fromkeys(names, 0)
                for _ in range(20_000):
                    usage = backend.usage()
                    held = dict(self.look(place))
                    assert usage.bytes >= sum(held.values())
                    assert usage.entries >= len(held)
                    if not held:
                        break

            run_forked(work, watch)
            self.agree(backend, place, {})

    def test_usage_takes_constant_time(self, place: Path) -> None:
        """With sixty times as many entries `usage` makes no more calls, and holds no more memory.

        A read-only handle, and one that opens after a crash, may count afresh.
        """
        work: list[tuple[int, int]] = []
        with self.opened(place) as backend:
            for start, end in ((0, 50), (50, self.large)):
                with backend.batch():
                    for number in range(start, end):
                        backend.put(key(number), b"x")
                backend.usage()
                work.append(work_of(backend.usage))
        (calls, size), (more_calls, more_size) = work
        assert more_calls <= 2 * calls + 20
        assert more_size <= 2 * size + 4096

    def test_more_than_max_size_is_put_or_refused(self, place: Path) -> None:
        """The cap is the engine's business: a put beyond it works, or raises `BackendError`.

        Either way what was put stays whole and counted, and there is room again after deletes.
        """
        cap = 1 << 20
        with self.opened(place, max_size=cap) as backend:
            put: dict[str, bytes] = {}
            for number in range(48):
                name = key(number)
                value = sealed(name, number, cap // 16)
                try:
                    backend.put(name, value)
                except BackendError:
                    continue
                put[name] = value
            assert len(put) >= 10
            self.agree(backend, place, put)
            for name in list(put):
                assert backend.delete(name) > 0
            self.agree(backend, place, {})
            backend.put(key(1), sealed(key(1), 1, cap // 2))
            self.agree(backend, place, {key(1): sealed(key(1), 1, cap // 2)})

    def test_a_place_that_is_something_else(self, tmp_path: Path) -> None:
        """If the place is no directory, only `BackendError` is raised."""
        if not self.persistent:
            pytest.skip("there is no place")
        place = tmp_path / "a file"
        place.write_bytes(b"not a directory")
        with pytest.raises(BackendError), self.opened(place) as backend:
            backend.put(key(1), b"value")
        assert place.read_bytes() == b"not a directory"
        assert os.listdir(tmp_path) == ["a file"]
