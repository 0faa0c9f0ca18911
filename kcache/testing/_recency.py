"""The contract's promises about recency: what `touch`, `use` and `coldest` do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kcache.testing._base import ContractBase, key, work_of
from kcache.testing._children import run_forked
from kcache.testing.clock import FakeClock

__all__ = ["RecencyTests"]


class RecencyTests(ContractBase):
    """`coldest` sorts by last use; puts, touches and uses of every handle and process count."""

    def test_coldest_goes_by_the_last_use(self, place: Path) -> None:
        """A put, a second put, a touch and a use each make an entry the most recently used."""
        clock = FakeClock()
        with self.opened(place, clock=clock) as backend:
            names = self.fill(backend, 12, clock=clock)
            self.order(backend.coldest(), names)

            def replace(name: str) -> None:
                backend.put(name, b"new")

            uses: tuple[Callable[[str], object], ...] = (backend.touch, backend.use, replace)
            for number in (3, 0, 7, 3, 11, 0, 5):
                for use in uses:
                    name = names[number]
                    use(name)
                    names.append(names.pop(number))
                    self.pass_time(clock)
                    self.order(backend.coldest(), names)

    def test_repeated_uses_count(self, place: Path) -> None:
        """The last of many uses of one entry is the one that counts, however fast they come."""
        clock = FakeClock()
        with self.opened(place, clock=clock) as backend:
            names = self.fill(backend, 4, clock=clock)
            for round_ in range(5):
                for name in (names[0], names[1]):
                    backend.use(name)
                    self.pass_time(clock)
                    if round_ % 2:
                        backend.touch(name)
                        self.pass_time(clock)
            self.order(backend.coldest(), [names[2], names[3], names[0], names[1]])

    def test_coldest_says_when_and_how_large(self, place: Path) -> None:
        """An `EntryInfo` has the size on the medium, and the time of the last use."""
        clock = FakeClock()
        with self.opened(place, clock=clock) as backend:
            times: dict[str, int] = {}
            for number in range(10):
                times[key(number)] = clock()
                backend.put(key(number), bytes(number))
                self.pass_time(clock)
            for number in (2, 4):
                times[key(number)] = clock()
                backend.touch(key(number))
                self.pass_time(clock)
            for infos in (list(backend.coldest()), list(backend.scan())):
                assert {info.key: info.size for info in infos} == self.look(place)
                if self.takes_clock:
                    for info in infos:
                        assert abs(info.used_ns - times[info.key]) <= self.resolution

    def test_uses_are_there_after_reopening(self, place: Path) -> None:
        """`close` loses no use, buffered or not."""
        if not self.persistent:
            pytest.skip("nothing persists")
        clock = FakeClock()
        with self.opened(place, clock=clock) as backend:
            names = self.fill(backend, 8, clock=clock)
            for number, use in ((0, backend.touch), (2, backend.use), (1, backend.touch)):
                use(names[number])
                self.pass_time(clock)
        with self.opened(place, clock=clock) as backend:
            self.order(backend.coldest(), [*names[3:], names[0], names[2], names[1]])

    def test_uses_of_another_handle_count(self, place: Path) -> None:
        """A use by another handle counts, at the latest when that handle is closed."""
        self.needs_sharing()
        clock = FakeClock()
        with self.opened(place, clock=clock) as backend:
            names = self.fill(backend, 8, clock=clock)
            with self.opened(place, clock=clock) as other:
                for number, use in ((1, other.use), (0, other.touch)):
                    use(names[number])
                    self.pass_time(clock)
            self.order(backend.coldest(), [*names[2:], names[1], names[0]])

    def test_uses_of_another_process_count(self, place: Path) -> None:
        """A use by another process counts, at the latest when that has closed its handle."""
        self.needs_processes()
        clock = FakeClock()
        with self.opened(place, clock=clock) as backend:
            names = self.fill(backend, 8, clock=clock)

            def work() -> None:
                with self.opened(place, clock=clock) as other:
                    other.use(names[1])
                    self.pass_time(clock)
                    other.touch(names[0])

            run_forked(work)
            self.order(backend.coldest(), [*names[2:], names[1], names[0]])

    def test_a_touch_brings_nothing_back(self, place: Path) -> None:
        """A touch that is written late does not revive an entry that was deleted meanwhile."""
        self.needs_sharing()
        with self.opened(place) as backend:
            names = self.fill(backend, 4)
            with self.opened(place) as other:
                for name in names:
                    other.use(name)
                    other.touch(name)
                backend.delete(names[0])
                other.delete(names[1])
                other.touch(names[1])
                assert {info.key for info in other.coldest()} == {*names[2:]}
            assert {info.key for info in backend.coldest()} == {*names[2:]}
            assert self.look(place).keys() == {*names[2:]}
            self.agree(backend, place)

    def test_coldest_yields_each_key_once_while_entries_change(self, place: Path) -> None:
        """An entry that is used or replaced during the iteration is not yielded again."""
        clock = FakeClock()
        with self.opened(place, clock=clock) as backend:
            names = self.fill(backend, 60, clock=clock)
            found: list[str] = []
            for info in backend.coldest():
                found.append(info.key)
                assert len(found) < 1000, "coldest never ends"
                backend.touch(info.key)
                backend.put(found[len(found) // 2], b"new")
                backend.use(names[-1])
                self.pass_time(clock)
            assert len(found) == len(set(found))
            assert set(found) >= {*names[:-1]}

    def test_coldest_goes_on_while_entries_are_deleted(self, place: Path) -> None:
        """Evicting as the engine does reaches every entry; what others delete is left out."""
        clock = FakeClock()
        with self.opened(place, clock=clock) as backend:
            names = self.fill(backend, 60, clock=clock)
            for name in names[40:50]:
                backend.delete(name)
            evicted = [info.key for info in backend.coldest() if backend.delete(info.key)]
            self.order_of(evicted, names[:40] + names[50:])
            self.agree(backend, place, {})

    def order_of(self, found: list[str], expected: list[str]) -> None:
        """Assert that these keys are the expected, in their order where order is exact."""
        assert sorted(found) == sorted(expected)
        if self.exact_order:
            assert found == expected

    def test_an_abandoned_iteration_changes_nothing(self, place: Path) -> None:
        """The next iteration begins with the coldest again, as of then."""
        clock = FakeClock()
        with self.opened(place, clock=clock) as backend:
            names = self.fill(backend, 10, clock=clock)
            for _ in range(3):
                infos = backend.coldest()
                for _ in range(4):
                    next(infos)
                del infos
                backend.use(names[0])
                names.append(names.pop(0))
                self.pass_time(clock)
            self.order(backend.coldest(), names)

    def test_two_iterations_at_once(self, place: Path) -> None:
        """Each of two interleaved iterations yields every entry, in order."""
        clock = FakeClock()
        with self.opened(place, clock=clock) as backend:
            names = self.fill(backend, 20, clock=clock)
            pairs = list(zip(backend.coldest(), backend.coldest(), strict=True))
            for side in (0, 1):
                self.order(iter([pair[side] for pair in pairs]), names)

    def test_starting_coldest_does_not_read_everything(self, place: Path) -> None:
        """The first entry of three times as many costs no more than twice the calls or memory."""
        work: list[tuple[int, int]] = []
        with self.opened(place) as backend:
            for start in (0, self.large, 2 * self.large):
                with backend.batch():
                    for number in range(start, start + self.large):
                        backend.put(key(number), b"x")
                if start != self.large:
                    work.append(work_of(lambda: next(backend.coldest())))
        (calls, size), (more_calls, more_size) = work
        assert more_calls <= 2 * calls + 100
        assert more_size <= 2 * size + 65_536

    def test_a_clock_that_is_set_back(self, place: Path) -> None:
        """Nothing fails, no entry is lost, and one handle's later uses stay later."""
        clock = FakeClock()
        with self.opened(place, clock=clock) as backend:
            names = self.fill(backend, 6, clock=clock)
            clock.set_back()
            for number, use in ((0, backend.touch), (1, backend.use)):
                use(names[number])
                self.pass_time(clock)
            self.order(backend.coldest(), [*names[2:], names[0], names[1]])
            backend.put(key("new"), b"new")
            self.order(backend.coldest(), [*names[2:], names[0], names[1], key("new")])
            if not self.persistent:
                return
        with self.opened(place, clock=clock) as backend:
            backend.touch(names[3])
            clock.set_back(10**9)
            backend.use(names[2])
            backend.put(key("new"), b"newer")
            found = [info.key for info in backend.coldest()]
            assert sorted(found) == sorted([*names, key("new")])
            self.agree(backend, place)
