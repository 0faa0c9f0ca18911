"""MemoryTier: never more bytes than its bound, the least recently used goes first."""

from collections import OrderedDict

from core.helpers import QUICK
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
            slot = self.tier.get(name)
            assert slot is not None
            assert slot.value is self.model[name][0]
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
