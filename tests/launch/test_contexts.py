"""Contexts and generations, over a driver that is a table of contexts: the rules, without a GPU.

That the driver does what is written here is tested by tests/gpu.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kcache.errors import ConfigError, DeviceError, StaleKernelError
from kcache.launch.contexts import Context, Contexts
from kcache.util.cuda_driver import FORKED


class Table:
    """The contexts of two devices, by address, and what is current in the one thread there is."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.devices: dict[int, int] = {}
        self.primary: dict[int, int] = {}
        self.retained: dict[int, int] = {0: 0, 1: 0}
        self.stack: list[int] = []
        self.forked = False
        self._next = 1000

    def make(self, device: int, address: int | None = None) -> int:
        self._next += 1
        address = self._next * 16 if address is None else address
        self.numbers[address] = self._next
        self.devices[address] = device
        return address

    def destroy(self, address: int) -> None:
        del self.numbers[address]

    # -- what Contexts calls -------------------------------------------------------------------

    def device_count(self) -> int:
        return 2

    def attribute(self, attribute: int, device: int) -> int:
        return {75: 9, 76: device, 97: 1000}[attribute]

    def current(self) -> int:
        return self.stack[-1] if self.stack else 0

    def current_device(self) -> int:
        return self.devices[self.current()]

    def current_id(self) -> int | None:
        return self.numbers.get(self.current())

    def context_id(self, context: int) -> int | None:
        return self.numbers.get(context)

    def watch(self, context: int) -> Callable[[], int | None]:
        return lambda: self.numbers.get(context)

    def push(self, context: int) -> None:
        assert context in self.numbers
        self.stack.append(context)

    def pop(self) -> None:
        self.stack.pop()

    def retain_primary(self, device: int) -> int:
        self.retained[device] += 1
        if self.primary.get(device) not in self.numbers:
            self.primary[device] = self.make(device)
        return self.primary[device]

    def release_primary(self, device: int) -> None:
        self.retained[device] -= 1
        if not self.retained[device]:
            self.destroy(self.primary[device])

    def primary_is_active(self, device: int) -> bool:
        return self.primary.get(device) in self.numbers


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture
def contexts(table: Table) -> Contexts:
    return Contexts(table)  # type: ignore[arg-type]


def stale(context: Context, reason: str) -> None:
    with pytest.raises(StaleKernelError, match=reason):
        context.check()


def test_without_a_current_context_it_is_the_primary_one_of_device_0(
    table: Table, contexts: Contexts
) -> None:
    context = contexts.get(None)
    assert (context.device, context.capability, context.generation) == (0, 90, 0)
    assert context.address == table.primary[0]
    assert contexts.get(None) is contexts.get(0) is context
    assert table.retained == {0: 1, 1: 0}
    assert table.stack == []
    context.check()


def test_the_current_context_is_taken_whatever_it_is(table: Table, contexts: Contexts) -> None:
    own = table.make(1)
    table.push(own)
    assert contexts.get(None).address == own
    assert contexts.get(1) is contexts.get(None)
    assert contexts.device(None) == 1
    assert table.retained == {0: 0, 1: 0}


def test_devices_and_contexts_share_nothing(table: Table, contexts: Contexts) -> None:
    first, second = contexts.get(0), contexts.get(1)
    table.push(table.make(0))
    third = contexts.get(0)
    assert len({id(c.modules) for c in (first, second, third)}) == 3
    assert (first.device, second.device, third.device) == (0, 1, 0)
    assert second.capability == 91


def test_another_device_is_left_alone_by_a_current_context(
    table: Table, contexts: Contexts
) -> None:
    table.push(table.make(0))
    assert contexts.get(1).address == table.primary[1]
    assert len(table.stack) == 1


def test_a_device_that_is_not_there_is_refused(contexts: Contexts) -> None:
    for device in (2, -1):
        with pytest.raises(ConfigError, match=f"device={device} is not allowed; allowed: .*0 to 1"):
            contexts.get(device)
        with pytest.raises(ConfigError, match="is not allowed"):
            contexts.device(device)


def test_a_reset_makes_every_context_of_the_device_stale_and_no_other(
    table: Table, contexts: Contexts
) -> None:
    primary, other = contexts.get(0), contexts.get(1)
    table.push(table.make(0))
    own = contexts.get(0)
    contexts.reset(0)
    for context in (primary, own):
        stale(context, r"context of device 0 that was reset \(generation 0\); load it again")
    other.check()
    assert (contexts.generation(0), contexts.generation(1)) == (1, 0)
    again = contexts.get(0)
    assert again is not own
    assert again.generation == 1
    again.check()
    stale(own, "was reset")


def test_a_reset_gives_the_primary_context_back(table: Table, contexts: Contexts) -> None:
    contexts.get(0)
    contexts.reset(0)
    contexts.reset(0)
    assert table.retained == {0: 0, 1: 0}
    assert contexts.get(0).generation == 2
    assert table.retained == {0: 1, 1: 0}


def test_a_context_that_was_destroyed_is_noticed(table: Table, contexts: Contexts) -> None:
    address = table.make(0)
    table.push(address)
    context = contexts.get(None)
    table.pop()
    table.destroy(address)
    stale(context, "was destroyed")


def test_a_context_at_the_address_of_a_destroyed_one_is_another(
    table: Table, contexts: Contexts
) -> None:
    address = table.make(0)
    table.push(address)
    context = contexts.get(None)
    table.destroy(address)
    table.make(0, address)
    again = contexts.get(None)
    assert again is not context
    assert again.generation == contexts.generation(0) == 1
    stale(context, "was replaced")


def test_a_primary_context_that_was_reset_behind_our_back_is_noticed(
    table: Table, contexts: Contexts
) -> None:
    context = contexts.get(0)
    table.destroy(table.primary[0])
    stale(context, "was destroyed")
    again = contexts.get(0)
    again.check()
    assert again.generation == 1
    assert table.retained == {0: 1, 1: 0}


def test_it_is_made_current_meanwhile(table: Table, contexts: Contexts) -> None:
    context = contexts.get(1)
    table.push(table.make(0))
    before = list(table.stack)
    with context.current():
        assert table.current() == context.address
        with context.current():
            assert len(table.stack) == 2
    assert table.stack == before


def test_a_forked_child_is_told_why(table: Table, contexts: Contexts) -> None:
    context = contexts.get(0)
    table.forked = True
    with pytest.raises(DeviceError, match="forked") as raised:
        context.check()
    assert str(raised.value) == FORKED
    assert not context.alive()
