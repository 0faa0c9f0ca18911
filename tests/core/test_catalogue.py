"""The catalogue: keys cut short, exact order of use, and what a trim would evict."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from core.helpers import QUICK, key
from hypothesis import given
from hypothesis import strategies as st

from kcache import CacheEngine, Entry
from kcache.backend import Backend, EntryInfo
from kcache.nvrtc.inventory import (
    DAMAGED,
    OTHER,
    coldest_first,
    items,
    look_into,
    matching,
    unique_length,
    would_evict,
)
from kcache.testing import MemoryBackend
from kcache_backends.file import FileBackend

#: Keys that often have long beginnings in common.
_KEYS = st.tuples(
    st.sampled_from(["", "0" * 5, "ab" * 7, "f" * 20, "c" * 63]), st.integers(0, 99)
).map(lambda parts: (parts[0] + key(parts[1]))[:64])


@QUICK
@given(st.sets(_KEYS, max_size=20))
def test_cut_keys_differ_and_are_no_longer_than_needed(keys: set[str]) -> None:
    length = unique_length(keys, least=4)
    assert len({name[:length] for name in keys}) == len(keys)
    shorter = {name[: length - 1] for name in keys}
    alike_beyond = len({name[:16] for name in keys}) < len(keys)
    assert length == 4 or len(shorter) < len(keys) or (alike_beyond and length == 64)


def test_no_keys_at_all() -> None:
    assert unique_length([]) == 8
    assert unique_length(["a" * 64]) == 8


@QUICK
@given(st.dictionaries(st.integers(0, 50), st.tuples(st.integers(0, 2**62), st.integers(0, 2**40))))
def test_the_coldest_first_exactly(entries: dict[int, tuple[int, int]]) -> None:
    infos = [EntryInfo(key(n), size, used) for n, (used, size) in entries.items()]

    class Fixed(MemoryBackend):
        def scan(self):  # type: ignore[no-untyped-def]
            return iter(infos)

    expected = sorted(infos, key=lambda info: (info.used_ns, info.key))
    assert list(coldest_first(Fixed())) == expected


def filled(backend: Backend, count: int = 20) -> CacheEngine:
    engine = CacheEngine(backend, producer="p")
    for n in range(count):
        engine.put(key(n), Entry({"a": bytes(100 + 13 * n)}))
    return engine


@QUICK
@given(st.integers(0, 10_000), st.lists(st.integers(0, 19), max_size=10))
def test_a_rehearsed_trim_is_what_a_trim_does(goal: int, used: list[int]) -> None:
    with filled(MemoryBackend()) as engine:
        for n in used:
            engine.get(key(n))
        count, freed = would_evict(engine.backend, goal)
        assert engine.entry_count == 20
        assert engine.trim(goal) == freed
        assert engine.stats().evictions == count


def test_a_rehearsed_trim_by_age(tmp_path: Path) -> None:
    now = [10**9]
    with closing(FileBackend(tmp_path, clock=lambda: now[0])) as backend:
        for n in range(4):
            now[0] = (n + 1) * 10**9
            backend.put(key(n), b"x" * 10)
        assert would_evict(backend, None, since_ns=2.5e9) == (2, 20)
        assert would_evict(backend, 10, since_ns=2.5e9) == (3, 30)
        assert would_evict(backend, 40, since_ns=2.5e9) == (2, 20)
        assert would_evict(backend, 40) == (0, 0)


def test_what_entries_are_told_apart_by_the_producer() -> None:
    with filled(MemoryBackend(), 2) as engine:
        engine.backend.put(key(1), b"damaged")
        assert {item.kind for item in items(engine.backend, "p")} == {OTHER, DAMAGED}
        (item,) = [item for item in items(engine.backend, "other") if item.key == key(0)]
        assert item.problem == "made by 'p'"
        gone = EntryInfo(key(9), 1, 1)
        assert look_into(engine.backend, gone, "p") is None


def test_prefixes_match_sorted_and_each_for_itself() -> None:
    with filled(MemoryBackend(), 50) as engine:
        found = matching(engine.backend, ["", key(3)[:5], "zz"])
        assert [info.key for info in found[""]] == sorted(key(n) for n in range(50))
        assert [info.key for info in found[key(3)[:5]]] == [key(3)]
        assert found["zz"] == []
