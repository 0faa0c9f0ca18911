"""MemoryTier: never more bytes than its bound, the least recently used goes first."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from random import Random

import pytest
from core.helpers import QUICK, fork, key, wait
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kcache import CompiledKernel, Entry, open_engine
from kcache.util.memory_tier import ITEM_OVERHEAD, MemoryTier

KEYS = st.sampled_from("abcdefgh")
ROOM = 5 * ITEM_OVERHEAD


class MemoryTierModel(RuleBasedStateMachine):
    """A MemoryTier against an ordered map that evicts by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.tier: MemoryTier[str, object] = MemoryTier(ROOM)
        self.model: OrderedDict[str, tuple[object, int]] = OrderedDict()

    @rule(name=KEYS, size=st.integers(0, ROOM))
    def put(self, name: str, size: int) -> None:
        value = object()
        self.tier.put(name, value, size)
        self.model.pop(name, None)
        if size + ITEM_OVERHEAD <= ROOM:
            self.model[name] = (value, size + ITEM_OVERHEAD)
        while sum(charge for _, charge in self.model.values()) > ROOM:
            self.model.popitem(last=False)

    @rule(name=KEYS)
    def get(self, name: str) -> None:
        if name in self.model:
            self.model.move_to_end(name)
            assert self.tier.get(name) is self.model[name][0]
        else:
            assert self.tier.get(name) is None

    @rule(name=KEYS)
    def delete(self, name: str) -> None:
        self.tier.delete(name)
        self.model.pop(name, None)

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        self.model.clear()

    @invariant()
    def charged_what_it_holds_and_within_the_bound(self) -> None:
        assert len(self.tier) == len(self.model)
        assert self.tier.size_bytes == sum(charge for _, charge in self.model.values()) <= ROOM


TestMemoryTierModel = MemoryTierModel.TestCase
TestMemoryTierModel.settings = QUICK


def test_the_least_recently_used_goes_first_and_a_get_is_a_use() -> None:
    tier: MemoryTier[str, int] = MemoryTier(3 * (ITEM_OVERHEAD + 100))
    for number, name in enumerate("abc"):
        tier.put(name, number, 100)
    assert tier.get("a") == 0
    tier.put("d", 3, 100)
    assert [tier.get(name) for name in "abcd"] == [0, None, 2, 3]


def test_a_value_larger_than_the_bound_is_not_kept_and_removes_the_old_one() -> None:
    tier: MemoryTier[str, int] = MemoryTier(ITEM_OVERHEAD + 100)
    tier.put("a", 1, 100)
    tier.put("a", 2, 101)
    assert tier.get("a") is None
    assert tier.size_bytes == 0


def test_a_tier_without_room_holds_nothing() -> None:
    tier: MemoryTier[str, int] = MemoryTier(0)
    tier.put("a", 1, 0)
    assert tier.get("a") is None


def test_threads_never_see_it_above_its_bound_and_leave_the_charge_right() -> None:
    tier: MemoryTier[int, int] = MemoryTier(10 * ITEM_OVERHEAD)
    wrong: list[object] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def hammer(seed: int) -> None:
        random = Random(seed)
        for _ in range(3000):
            name = random.randrange(30)
            operation = random.randrange(10)
            if operation < 5:
                tier.put(name, name, random.randrange(3 * ITEM_OVERHEAD))
            elif operation < 9:
                if tier.get(name) not in (None, name):
                    wrong.append(name)
            else:
                tier.delete(name)
            if tier.size_bytes < 0:
                wrong.append(tier.size_bytes)

    threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    assert 0 < tier.size_bytes <= tier.max_size
    for name in range(30):
        tier.delete(name)
    assert (len(tier), tier.size_bytes) == (0, 0)


def kernel_entry(number: int, names: int) -> Entry:
    """Returns what the NVRTC frontend stores for a small kernel."""
    expressions = [f"axpy<float, {n}, {number}>" for n in range(names)]
    return Entry(
        {"ptx": bytes(3000) + number.to_bytes(4), "cubin": bytes(5000)},
        {
            "kind": "kernel",
            "compile_seconds": 0.123456789 + number,
            "lowered_names": {e: f"_Z4axpyIfLi{number}EEvT_PK{len(e)}S0_" for e in expressions},
            "log": f"kernel.cu({number}): warning #177-D: variable was declared but not used\n",
            "source_name": f"kernel{number}.cu",
            "names": [*expressions],
            "arch": "sm_90",
            "flags": ["-arch=sm_90", "-std=c++17", "--use_fast_math", f"-DN={number}", "-I0"],
            "compiler": key(number)[:40],
            "created": 1.7e9 + number,
        },
    )


@pytest.mark.parametrize("names", [0, 2, 8])
@pytest.mark.parametrize("written_here", [False, True], ids=["read", "written"])
def test_real_memory_per_item_is_within_payload_and_stated_overhead(
    names: int, written_here: bool, tmp_path: Path
) -> None:
    count = 300
    with open_engine(tmp_path) as engine:
        for number in range(count):
            engine.put(key(number), kernel_entry(number, names))
    keys = [key(number) for number in range(count)]
    with open_engine(tmp_path, memory_size="100MB") as engine:
        engine.get(key(0))  # so that the imports of a first use are done
        engine.memory.clear()
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for number, name in enumerate(keys):
                if written_here:
                    engine.put(name, kernel_entry(number, names))
                found = engine.get(name)
                assert found is not None
                found.view = CompiledKernel.from_entry(found, name, ())  # as the front door does
            del found
            gc.collect()
            used = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert len(engine.memory) == count
        assert used <= engine.memory.size_bytes


def test_a_forked_child_is_not_kept_by_a_lock_of_its_parents_threads() -> None:
    tier: MemoryTier[str, int] = MemoryTier(10**6)
    tier.put("a", 1, 10)

    def work() -> None:
        assert tier.get("a") == 1

    with tier._lock:
        child = fork(work)
    assert wait(child) == 0
