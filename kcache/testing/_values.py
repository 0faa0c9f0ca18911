"""The contract's promises about values, their sizes and their recency, whoever writes."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest

from kcache.errors import BackendError
from kcache.testing._base import ContractBase, key, run_forked, sealed, work_of
from kcache.testing.doubles import FakeClock

#: Around 0, around the sizes of pages of 4, 16 and 64 KiB, and large.
SIZES = [
    *(0, 1, 2, 15, 255, 256, 1000, 2000, 2048),
    *(size + more for size in (4096, 8192, 16384, 65536) for more in (-17, -1, 0, 1, 17)),
    1 << 20,
]
#: A number of entries that `coldest` may not examine at its start.
_LARGE = 3_000


class ValueTests(ContractBase):
    """A value stays under its key, complete, until it is replaced or deleted.

    `usage` is what the medium holds, counts everybody, and is never below the truth.
    """

    def test_a_value_comes_back_as_it_was_put(self, place: Path) -> None:
        """`get` and `use` return the bytes that were put: none, one, a page, a megabyte.

        `put` returns what the medium holds, which exceeds the length by `overhead` at most, and
        `scan` yields that.
        """
        random = Random(1)
        with self.opened(place) as backend:
            for size in SIZES:
                for value in (bytes(size), random.randbytes(size)):
                    stored = backend.put(key(size), value)
                    assert stored == self.look(place)[key(size)] <= size + backend.overhead
                    for found in (backend.get(key(size)), backend.use(key(size))):
                        assert found == value
                        assert type(found) is bytes
            assert {info.key: info.size for info in backend.scan()} == self.look(place)
            assert {info.key for info in backend.coldest()} == {key(size) for size in SIZES}

    def test_scan_goes_on_while_entries_change(self, place: Path) -> None:
        """`scan` yields each unchanged entry once, and each changed entry at most once."""
        with self.opened(place) as backend:
            names = self.fill(backend, 120)
            stays = set(names[::2])
            goes = names[1::2]
            found: list[str] = []
            for number, info in enumerate(backend.scan()):
                found.append(info.key)
                if number < len(goes):
                    backend.delete(goes[number])
                    backend.put(key(f"new {number}"), b"new")
            assert len(found) == len(set(found))
            assert stays <= set(found)
            self.agree(backend, place)

    # -- size --------------------------------------------------------------------------------------

    def test_usage_is_never_below_the_truth_while_others_write(self, place: Path) -> None:
        """While others put and delete, `usage` is at least what is held before and after it."""
        self.needs("shared")
        with self.opened(place) as backend:

            def work(writer: int) -> None:
                with self.opened(place) as other:
                    names = [key(f"{writer} {number}") for number in range(40)]
                    for number, name in enumerate(names):
                        other.put(name, bytes(10 + 40 * number))
                    for name in names:
                        assert other.delete(name) > 0
                    other.put(key(writer), b"done")

            def watch() -> None:
                ends = {key(1), key(2)}
                after = self.look(place)
                for _ in range(20_000):
                    before, usage, after = after, backend.usage(), self.look(place)
                    held = [after[name] for name in before if name in after]
                    assert usage.bytes >= sum(held)
                    assert usage.entries >= len(held)
                    if after.keys() == ends:
                        break

            run_forked(lambda: run_forked(lambda: work(1), lambda: work(2)), watch)
            self.agree(backend, place, {key(1): b"done", key(2): b"done"})

    def test_a_large_cache_costs_no_more_than_a_small_one(self, place: Path) -> None:
        """With more entries, `usage` and the start of `coldest` make no more calls.

        They hold no more memory either. A read-only handle, and one that opens after a crash, may
        count afresh.
        """
        usages: list[tuple[int, int]] = []
        starts: list[tuple[int, int]] = []
        with self.opened(place) as backend:
            for start, end in ((0, 50), (50, _LARGE), (_LARGE, 3 * _LARGE)):
                with backend.batch():
                    for number in range(start, end):
                        backend.put(key(number), b"x")
                backend.usage()
                usages.append(work_of(backend.usage))
                starts.append(work_of(lambda: next(backend.coldest())))
        for (calls, size), (more_calls, more_size) in (usages[:2], starts[1:]):
            assert more_calls <= 2 * calls + 100
            assert more_size <= 2 * size + 65_536

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
        """If the place is not a directory, only `BackendError` is raised."""
        self.needs("persistent")
        place = tmp_path / "a file"
        place.write_bytes(b"not a directory")
        with pytest.raises(BackendError), self.opened(place) as backend:
            backend.put(key(1), b"value")
        assert place.read_bytes() == b"not a directory"
        assert os.listdir(tmp_path) == ["a file"]


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
        self.needs("shared")
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
        """A touch that is written late does not revive an entry that was deleted before."""
        self.needs("shared")
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

    def test_a_clock_that_is_set_back(self, place: Path) -> None:
        """Nothing fails, no entry is lost, and one handle's later uses stay later."""
        clock = FakeClock()
        with self.opened(place, clock=clock) as backend:
            names = self.fill(backend, 6, clock=clock)
            clock.advance(-3600)
            for number, use in ((0, backend.touch), (1, backend.use)):
                use(names[number])
                self.pass_time(clock)
            self.order(backend.coldest(), [*names[2:], names[0], names[1]])
            backend.put(key("new"), b"new")
            self.order(backend.coldest(), [*names[2:], names[0], names[1], key("new")])
            self.agree(backend, place)
