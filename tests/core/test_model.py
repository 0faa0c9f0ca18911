"""Engine and file backend against plain models, under random operations and random harm."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from core.helpers import LONG, QUICK, entry, key, look, path_of, stored_size
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kcache import CacheEngine, Entry, open_engine
from kcache.engine import LOW_WATER

#: Some share a shard, most don't.
KEYS = st.sampled_from([key(n, shard=1) for n in range(3)] + [key(n) for n in range(9)])
SIZES = st.sampled_from([0, 1, 100, 100, 250, 600, 2000])
CAP = 8 * stored_size(100)

FEW = settings(QUICK, max_examples=40, stateful_step_count=40)
MANY = settings(LONG, max_examples=150, stateful_step_count=60)


class CacheModel(RuleBasedStateMachine):
    """What is common: an engine in a directory of its own, and what was put last."""

    memory_size = 0

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(prefix="kcache-model-"))
        self.files = self.place / "file"
        self.engine = self.open()
        self.puts = 0

    def open(self) -> CacheEngine:
        return open_engine(self.place, max_size=CAP, memory_size=self.memory_size)

    def teardown(self) -> None:
        self.engine.close()
        shutil.rmtree(self.place, ignore_errors=True)

    def another(self, size: int) -> Entry:
        self.puts += 1
        return entry(size, self.puts, compile_seconds=1.0)

    def cost(self, made: Entry) -> int:
        from kcache.entry import encode

        return len(encode(key(0), made))

    @invariant()
    def the_cap_holds(self) -> None:
        tree = look(self.files)
        assert tree.bytes <= CAP
        assert tree.temporary == []

    @invariant()
    def nothing_failed(self) -> None:
        assert self.engine.stats().errors == 0


class ExactModel(CacheModel):
    """Nobody else touches the directory: the contents are exactly those of an LRU map."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, Entry] = {}  # least recently used first

    def use(self, name: str) -> None:
        self.model[name] = self.model.pop(name)

    def evict_to(self, goal: int) -> None:
        while sum(map(self.cost, self.model.values())) > goal:
            del self.model[next(iter(self.model))]

    @rule(name=KEYS, size=SIZES)
    def put(self, name: str, size: int) -> None:
        made = self.another(size)
        cost = self.cost(made)
        assert self.engine.put(name, made) is (cost <= CAP)
        if cost > CAP:
            self.model.pop(name, None)
            return
        if sum(map(self.cost, self.model.values())) > CAP - cost:
            low = int(CAP * LOW_WATER) - cost
            self.evict_to(low if low >= 0 else CAP - cost)
        self.model.pop(name, None)
        self.model[name] = made

    @rule(name=KEYS)
    def get(self, name: str) -> None:
        assert self.engine.get(name) == self.model.get(name)
        if name in self.model:
            self.use(name)

    @rule(name=KEYS, size=SIZES)
    def get_or_create(self, name: str, size: int) -> None:
        if name in self.model:
            found = self.engine.get_or_create(name, lambda: pytest.fail("created in vain"))
            assert found == self.model[name]
            self.use(name)
        else:
            self.put(name, size)

    @rule(name=KEYS)
    def delete(self, name: str) -> None:
        assert self.engine.delete(name) is (name in self.model)
        self.model.pop(name, None)

    @rule(goal=st.integers(0, CAP))
    def trim(self, goal: int) -> None:
        before = look(self.files).bytes
        freed = self.engine.trim(goal)
        self.evict_to(goal)
        assert freed == before - look(self.files).bytes

    @rule()
    def clear(self) -> None:
        assert self.engine.clear() == len(self.model)
        self.model.clear()

    @rule()
    def reopen(self) -> None:
        self.engine.close()
        self.engine = self.open()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert {n: self.cost(e) for n, e in self.model.items()} == look(self.files).entries
        usage = self.engine.backend.usage()
        assert usage == (look(self.files).bytes, len(self.model))


class HarmedModel(CacheModel):
    """Files are damaged and removed by others: what is served is what was put last, or nothing."""

    @initialize(memory_size=st.sampled_from([0, 0, 100_000]))
    def choose(self, memory_size: int) -> None:
        self.memory_size = memory_size
        self.engine.close()
        self.engine = self.open()
        self.last: dict[str, Entry] = {}
        self.damaged: set[str] = set()

    @rule(name=KEYS, size=SIZES)
    def put(self, name: str, size: int) -> None:
        made = self.another(size)
        if self.engine.put(name, made):
            self.last[name] = made
            self.damaged.discard(name)
            assert name in look(self.files).entries
        else:
            self.last.pop(name, None)

    @rule(name=KEYS)
    def get(self, name: str) -> None:
        sound = path_of(self.files, name).exists() and name not in self.damaged
        found = self.engine.get(name)
        if sound:
            assert found == self.last[name]
        elif self.memory_size:
            assert found is None or found == self.last.get(name)
        else:
            assert found is None

    @rule(name=KEYS)
    def delete(self, name: str) -> None:
        self.engine.delete(name)
        self.last.pop(name, None)
        assert name not in look(self.files).entries

    @rule(goal=st.integers(0, CAP))
    def trim(self, goal: int) -> None:
        self.engine.trim(goal)
        assert look(self.files).bytes <= goal

    @rule()
    def clear(self) -> None:
        self.engine.clear()
        self.last.clear()
        assert look(self.files).entries == {}

    @rule()
    def reopen(self) -> None:
        self.engine.close()
        self.engine = self.open()

    # -- harm ----------------------------------------------------------------------------------

    def one_of(self, number: int) -> Path | None:
        names = sorted(look(self.files).entries)
        return path_of(self.files, names[number % len(names)]) if names else None

    @rule(number=st.integers(0, 100), offset=st.integers(0, 5000), bits=st.integers(1, 255))
    def flip_bits(self, number: int, offset: int, bits: int) -> None:
        path = self.one_of(number)
        if path and path.name not in self.damaged:
            image = bytearray(path.read_bytes())
            image[offset % len(image)] ^= bits
            path.write_bytes(image)
            self.damaged.add(path.name)

    @rule(number=st.integers(0, 100), length=st.integers(0, 300))
    def truncate(self, number: int, length: int) -> None:
        path = self.one_of(number)
        if path and length < path.stat().st_size:
            os.truncate(path, length)
            self.damaged.add(path.name)

    @rule(one=st.integers(0, 100), two=st.integers(0, 100))
    def swap(self, one: int, two: int) -> None:
        first, second = self.one_of(one), self.one_of(two)
        if first and second and first.stat().st_size == second.stat().st_size and first != second:
            image = first.read_bytes()
            first.write_bytes(second.read_bytes())
            second.write_bytes(image)
            self.damaged |= {first.name, second.name}

    @rule(number=st.integers(0, 100))
    def remove_a_file(self, number: int) -> None:
        path = self.one_of(number)
        if path:
            path.unlink()

    @rule(number=st.integers(0, 100))
    def remove_a_shard(self, number: int) -> None:
        path = self.one_of(number)
        if path:
            shutil.rmtree(path.parent)

    @rule()
    def remove_everything(self) -> None:
        shutil.rmtree(self.place)

    @precondition(lambda self: (self.files / "counters").exists())
    @rule(junk=st.binary(max_size=64), offset=st.integers(0, 8192))
    def damage_the_counters(self, junk: bytes, offset: int) -> None:
        with (self.files / "counters").open("r+b") as file:
            file.seek(offset)
            file.write(junk)

    @precondition(lambda self: (self.files / "counters").exists())
    @rule(length=st.integers(0, 8191))
    def truncate_the_counters(self, length: int) -> None:
        os.truncate(self.files / "counters", length)

    @rule()
    def remove_the_counters(self) -> None:
        (self.files / "counters").unlink(missing_ok=True)

    @rule()
    def damage_the_statistics(self) -> None:
        if (self.place / "stats").exists():
            (self.place / "stats").write_bytes(os.urandom(1000))

    @invariant()
    def usage_is_at_or_above_the_truth(self) -> None:
        tree = look(self.files)
        usage = self.engine.backend.usage()
        assert usage.bytes >= tree.bytes
        assert usage.entries >= len(tree.entries)


MODELS = [ExactModel, HarmedModel]


@pytest.mark.parametrize("model", MODELS)
def test_a_cache_behaves_as_its_model(model: type[CacheModel]) -> None:
    run_state_machine_as_test(model, settings=FEW)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_cache_behaves_as_its_model_for_long(model: type[CacheModel]) -> None:
    run_state_machine_as_test(model, settings=MANY)
