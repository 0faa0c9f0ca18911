"""The contract's promises about recency: what `touch`, `use` and `coldest` do."""

from __future__ import annotations

from pathlib import Path

from kcache.testing._base import ContractBase, key
from kcache.testing._children import run_forked
from kcache.testing.clock import FakeClock

__all__ = ["RecencyTests"]


class RecencyTests(ContractBase):
    """`coldest` sorts by last use; puts, touches and uses of every handle and process count."""

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

    def test_two_iterations_at_once(self, place: Path) -> None:
        """Each of two interleaved iterations yields every entry, in order."""
        clock = FakeClock()
        with self.opened(place, clock=clock) as backend:
            names = self.fill(backend, 20, clock=clock)
            pairs = list(zip(backend.coldest(), backend.coldest(), strict=True))
            for side in (0, 1):
                self.order(iter([pair[side] for pair in pairs]), names)

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
            self.agree(backend, place)
