"""MemoryTier: never more bytes than its bound, the least recently used goes first."""

import sys
from collections import OrderedDict
from functools import partial
from random import Random

from core.helpers import QUICK, run_all
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

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


def test_it_behaves_as_its_model() -> None:
    run_state_machine_as_test(MemoryTierModel, settings=settings(QUICK, stateful_step_count=25))


def test_threads_never_see_it_above_its_bound_and_leave_the_charge_right() -> None:
    tier: MemoryTier[int, int] = MemoryTier(10 * ITEM_OVERHEAD)
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
                assert tier.get(name) in (None, name)
            else:
                tier.delete(name)
            assert tier.size_bytes >= 0

    try:
        assert run_all(*(partial(hammer, seed) for seed in range(4))) == [None] * 4
    finally:
        sys.setswitchinterval(interval)
    assert 0 < tier.size_bytes <= tier.max_size
    for name in range(30):
        tier.delete(name)
    assert (len(tier), tier.size_bytes) == (0, 0)
