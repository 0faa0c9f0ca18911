"""The contract's promises about values: what `get`, `use`, `put`, `delete` and `scan` do."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kcache.backend import EntryInfo
from kcache.testing._base import ContractBase, key, sealed

__all__ = ["ValueTests"]

#: Around 0, around the sizes of pages of 4, 16 and 64 KiB, and large.
SIZES = [
    *(0, 1, 2, 15, 255, 256, 1000, 2000, 2048),
    *(size + more for size in (4096, 8192, 16384, 65536) for more in (-17, -1, 0, 1, 17)),
    1 << 20,
]
#: Keys that differ little, or look like paths or names.
ALIKE = [
    "0" * 64,
    "0" * 63 + "1",
    "1" + "0" * 63,
    "f" * 64,
    "f" * 63 + "e",
    "0f" * 32,
    "f0" * 32,
    "1" * 64,
    "123e" * 16,
]

_OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "delete", "touch", "use", "get", "reopen"]),
        st.integers(0, 5),
        st.sampled_from([0, 1, 40, 500, 4095, 4096, 5000]),
    ),
    max_size=40,
)


class ValueTests(ContractBase):
    """A value stays under its key, complete, until it is replaced or deleted."""

    def test_a_value_comes_back_as_it_was_put(self, place: Path) -> None:
        """`get` and `use` return the bytes that were put: none, one, a page, a megabyte."""
        random = Random(1)
        with self.opened(place) as backend:
            for size in SIZES:
                for value in (bytes(size), random.randbytes(size)):
                    backend.put(key(size), value)
                    for found in (backend.get(key(size)), backend.use(key(size))):
                        assert found == value
                        assert type(found) is bytes
            for size in SIZES:
                found = backend.get(key(size))
                assert found is not None
                assert len(found) == size

    def test_put_returns_the_stored_size(self, place: Path) -> None:
        """`put` returns what the medium holds, which exceeds the length by `overhead` at most."""
        random = Random(2)
        with self.opened(place) as backend:
            for size in SIZES:
                for value in (bytes(size), random.randbytes(size)):
                    stored = backend.put(key(size), value)
                    assert stored == self.look(place)[key(size)]
                    assert stored <= size + backend.overhead

    def test_the_last_put_wins(self, place: Path) -> None:
        """A put replaces, be the new value longer, shorter, or the same again."""
        with self.opened(place) as backend:
            for size in (100, 5000, 20, 20, 0, 70_000, 1):
                value = sealed(key(1), size, max(size, 16))[:size]
                backend.put(key(1), value)
                self.agree(backend, place, {key(1): value})

    def test_an_absent_key_is_a_miss(self, place: Path) -> None:
        """A key that was never put is None, frees nothing, and can't be touched into being."""
        with self.opened(place) as backend:
            for _ in range(2):
                assert backend.get(key(1)) is None
                assert backend.use(key(1)) is None
                assert backend.delete(key(1)) == 0
                backend.touch(key(1))
                assert list(backend.scan()) == list(backend.coldest()) == []
                self.agree(backend, place, {})
                backend.put(key(2), b"other")
                backend.delete(key(2))

    def test_delete_returns_what_it_freed(self, place: Path) -> None:
        """`delete` removes the entry and returns its stored size."""
        with self.opened(place) as backend:
            for size in SIZES[::3]:
                backend.put(key(size), bytes(size))
                backend.put(key("stays"), b"stays")
                held = self.look(place)
                assert backend.delete(key(size)) == held[key(size)]
                assert backend.get(key(size)) is None
                assert backend.use(key(size)) is None
                self.agree(backend, place, {key("stays"): b"stays"})

    def test_deleting_twice_frees_nothing_more(self, place: Path) -> None:
        """`delete` is idempotent, and what it deleted can be put again."""
        with self.opened(place) as backend:
            for _ in range(3):
                stored = backend.put(key(1), b"value")
                assert backend.delete(key(1)) == stored
                assert backend.delete(key(1)) == 0
                assert backend.delete(key(1)) == 0
                self.agree(backend, place, {})
            backend.put(key(1), b"again")
            self.agree(backend, place, {key(1): b"again"})

    def test_keys_that_look_alike_are_told_apart(self, place: Path) -> None:
        """Every digit of a key counts."""
        expected = {name: name.encode() * number for number, name in enumerate(ALIKE)}
        with self.opened(place) as backend:
            for name, value in expected.items():
                backend.put(name, value)
            self.agree(backend, place, expected)
            for name in ALIKE:
                backend.delete(name)
                del expected[name]
                self.agree(backend, place, expected)

    def test_a_returned_value_stays_as_it_is(self, place: Path) -> None:
        """What `get` returned does not change when the entry does."""
        value = sealed(key(1), 1, 10_000)
        with self.opened(place) as backend:
            backend.put(key(1), value)
            found, used = backend.get(key(1)), backend.use(key(1))
            backend.put(key(1), bytes(10_000))
            backend.delete(key(1))
            self.fill(backend, 20, size=10_000)
        assert found == used == value

    def test_scan_yields_every_entry_with_its_size(self, place: Path) -> None:
        """`scan` yields each entry once, of the size that the medium holds."""
        with self.opened(place) as backend:
            for number in range(100):
                backend.put(key(number), bytes(37 * number))
            infos = list(backend.scan())
            assert len(infos) == 100
            assert {info.key: info.size for info in infos} == self.look(place)
            assert all(type(info) is EntryInfo for info in infos)

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

    def test_two_scans_at_once(self, place: Path) -> None:
        """Each of two interleaved scans yields every entry."""
        with self.opened(place) as backend:
            names = self.fill(backend, 50)
            pairs = list(zip(backend.scan(), backend.scan(), strict=True))
            for side in (0, 1):
                assert sorted(pair[side].key for pair in pairs) == sorted(names)

    def test_reopening_keeps_everything(self, place: Path) -> None:
        """Entries are there, and counted, when the place is opened the next time."""
        if not self.persistent:
            pytest.skip("nothing persists")
        expected = {key(size): sealed(key(size), size, size + 16) for size in SIZES}
        with self.opened(place) as backend:
            for name, value in expected.items():
                backend.put(name, value)
            usage = backend.usage()
        for _ in range(2):
            with self.opened(place) as backend:
                assert backend.usage() == usage
                self.agree(backend, place, expected)
                assert {info.key for info in backend.scan()} == expected.keys()

    def test_a_second_handle_sees_every_change(self, place: Path) -> None:
        """Handles on one place, in one process, see each other's changes at once."""
        self.needs_sharing()
        with self.opened(place) as first, self.opened(place) as second:
            for size in (100, 5000, 30):
                for writer, reader in ((first, second), (second, first)):
                    value = sealed(key(1), size, size)
                    writer.put(key(1), value)
                    assert reader.get(key(1)) == reader.use(key(1)) == value
                    self.agree(reader, place, {key(1): value})
                    assert writer.delete(key(1)) > 0
                    assert reader.get(key(1)) is None
                    assert reader.delete(key(1)) == 0
                    self.agree(reader, place, {})

    def test_random_operations_agree_with_a_map(self, place: Path) -> None:
        """Any sequence of operations leaves what it would leave in a dict."""

        @settings(
            max_examples=25,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(operations=_OPERATIONS)
        def behaves(operations: list[tuple[str, int, int]]) -> None:
            place.parent.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(dir=place.parent))
            try:
                self._compare(folder / "place", operations)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        behaves()

    def _compare(self, place: Path, operations: list[tuple[str, int, int]]) -> None:
        model: dict[str, bytes] = {}
        backend = self.open(place)
        try:
            for step, (operation, number, size) in enumerate(operations):
                name = key(number)
                if operation == "put":
                    model[name] = sealed(name, step, size + 16)
                    backend.put(name, model[name])
                elif operation == "delete":
                    assert (backend.delete(name) > 0) is (model.pop(name, None) is not None)
                elif operation == "touch":
                    backend.touch(name)
                elif operation == "use":
                    assert backend.use(name) == model.get(name)
                elif operation == "get":
                    assert backend.get(name) == model.get(name)
                elif self.persistent:
                    backend.close()
                    backend = self.open(place)
                self.agree(backend, place)
            self.agree(backend, place, model)
        finally:
            backend.close()
