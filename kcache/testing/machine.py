"""CacheMachine: engine and backend against a model, under random operations and random harm."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,  # pyright: ignore[reportUnknownVariableType]
)

from kcache.engine.eviction import LOW_WATER
from kcache.entry import Entry
from kcache.testing._machine import DEFAULTS, KEYS, SIZES, Machine, Open

__all__ = ["DEFAULTS", "CacheMachine", "HarmedMachine", "Open", "run_cache_machine"]


class CacheMachine(Machine):
    """Nobody else touches the place, so it holds exactly what an LRU map of that cap holds.

    The model has entries and their stored sizes, least recently used first. It evicts by the
    engine's rule: to make room for an incoming entry, it goes down to `LOW_WATER` of the cap.
    """

    def __init__(
        self,
        open: Open,
        look: Callable[[Path], Mapping[str, int]],
        *,
        persistent: bool = True,
    ) -> None:
        self.model: dict[str, Entry] = {}
        self.sizes: dict[str, int] = {}
        super().__init__(open, look, persistent=persistent)

    def use(self, name: str) -> None:
        """Make `name` the model's most recently used."""
        self.model[name] = self.model.pop(name)

    def forget(self, name: str) -> None:
        """Remove `name` from the model, if it is there."""
        self.model.pop(name, None)
        self.sizes.pop(name, None)

    def evict_to(self, goal: int) -> None:
        """Remove the model's coldest until the rest takes `goal` bytes at most."""
        while sum(self.sizes.values()) > goal:
            self.forget(next(iter(self.model)))

    @rule(name=st.sampled_from(KEYS), size=st.sampled_from(SIZES))
    def put(self, name: str, size: int) -> None:
        """Put a new entry; one that exceeds the cap replaces nothing and removes the old."""
        self.pass_time()
        made = self.another(size)
        reserve = self.reserve(made)
        assert self.engine.put(name, made) is (reserve <= self.cap)
        if reserve > self.cap:
            self.forget(name)
            return
        if sum(self.sizes.values()) > self.cap - reserve:
            low = int(self.cap * LOW_WATER) - reserve
            self.evict_to(low if low >= 0 else self.cap - reserve)
        self.forget(name)
        self.model[name] = made
        self.sizes[name] = self.look()[name]
        assert self.sizes[name] <= reserve

    @rule(name=st.sampled_from(KEYS))
    def get(self, name: str) -> None:
        """Get what was put last, and use it."""
        self.pass_time()
        assert self.engine.get(name) == self.model.get(name)
        if name in self.model:
            self.use(name)

    @rule(name=st.sampled_from(KEYS), size=st.sampled_from(SIZES))
    def get_or_create(self, name: str, size: int) -> None:
        """Get an entry, or create it if it is not there."""
        if name not in self.model:
            self.put(name, size)
            return
        self.pass_time()
        made: list[Entry] = []

        def create() -> Entry:
            made.append(self.another(size))
            return made[0]

        assert self.engine.get_or_create(name, create) == self.model[name]
        assert made == [], "created in vain"
        self.use(name)

    @rule(name=st.sampled_from(KEYS))
    def delete(self, name: str) -> None:
        """Delete one, and be told whether it was there."""
        assert self.engine.delete(name) is (name in self.model)
        self.forget(name)

    @rule(hundredths=st.integers(0, 800))
    def trim(self, hundredths: int) -> None:
        """Evict the coldest, down to some size."""
        goal = hundredths * self.unit // 100
        before = sum(self.look().values())
        freed = self.engine.trim(goal)
        self.evict_to(goal)
        assert freed == before - sum(self.look().values())

    @rule()
    def clear(self) -> None:
        """Delete everything."""
        assert self.engine.clear() == len(self.model)
        self.model.clear()
        self.sizes.clear()

    @rule()
    def list_the_coldest(self) -> None:
        """See the entries in the order in which they would go."""
        assert [info.key for info in self.engine.backend.coldest()] == list(self.model)

    @precondition(lambda self: self.persistent)
    @rule()
    def open_anew(self) -> None:
        """Close, and open again."""
        self.reopen()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        """The medium and the usage are the model's."""
        assert self.look() == self.sizes
        usage = self.engine.backend.usage()
        assert usage == (sum(self.sizes.values()), len(self.model))

    @invariant()
    def nothing_failed(self) -> None:
        """The engine has survived nothing, because nothing happened."""
        stats = self.engine.stats()
        assert (stats.errors, stats.corrupt, stats.stale) == (0, 0, 0)


class HarmedMachine(Machine):
    """Others damage and remove files; each get returns the last value that was put, or nothing.

    The order of evictions is not checked, so this fits backends with an approximate order.
    """

    def __init__(
        self,
        open: Open,
        look: Callable[[Path], Mapping[str, int]],
        *,
        read_raw: Callable[[Path, str], bytes] | None = None,
        write_raw: Callable[[Path, str, bytes], object] | None = None,
        persistent: bool = True,
        heals: bool = True,
    ) -> None:
        self.last: dict[str, Entry] = {}
        self.damaged: set[str] = set()
        self.removed = False
        super().__init__(
            open,
            look,
            read_raw=read_raw,
            write_raw=write_raw,
            persistent=persistent,
            heals=heals,
        )

    @initialize(memory_size=st.sampled_from([0, 0, 100_000]))
    def choose(self, memory_size: int) -> None:
        """Take a memory tier, or none."""
        self.memory_size = memory_size
        self.reopen()

    @rule(name=st.sampled_from(KEYS), size=st.sampled_from(SIZES))
    def put(self, name: str, size: int) -> None:
        """Put a new entry, which is there if the engine says so."""
        self.pass_time()
        made = self.another(size)
        if self.engine.put(name, made):
            self.last[name] = made
            self.damaged.discard(name)
            assert name in self.look()
        else:
            self.last.pop(name, None)

    @rule(name=st.sampled_from(KEYS))
    def get(self, name: str) -> None:
        """Get what was put last; what is damaged or gone at most from memory."""
        self.pass_time()
        sound = name in self.look() and name not in self.damaged
        found = self.engine.get(name)
        if sound:
            assert found == self.last[name]
        else:
            assert found is None or found == self.last.get(name)

    @rule(name=st.sampled_from(KEYS))
    def delete(self, name: str) -> None:
        """Delete one."""
        self.engine.delete(name)
        self.last.pop(name, None)
        assert name not in self.look()

    @rule(hundredths=st.integers(0, 800))
    def trim(self, hundredths: int) -> None:
        """Evict down to some size."""
        goal = hundredths * self.unit // 100
        self.engine.trim(goal)
        assert sum(self.look().values()) <= goal

    @rule()
    def clear(self) -> None:
        """Delete everything."""
        self.engine.clear()
        self.last.clear()
        assert self.look() == {}

    @precondition(lambda self: self.persistent)
    @rule()
    def open_anew(self) -> None:
        """Close, and open again."""
        self.reopen()

    # -- harm ----------------------------------------------------------------------------------

    def one_of(self, number: int) -> str | None:
        """Return one of the keys that the medium holds."""
        names = sorted(self.look())
        return names[number % len(names)] if names else None

    def change_raw(self, name: str, change: Callable[[bytes], bytes]) -> None:
        """Replace the bytes under `name` by what `change` makes of them."""
        if self._read_raw is not None and self._write_raw is not None:
            image = self._read_raw(self.place, name)
            changed = change(image)
            if changed != image:
                self._write_raw(self.place, name, changed)
                self.damaged.add(name)

    @precondition(lambda self: self.harmful)
    @rule(number=st.integers(0, 100), offset=st.integers(0, 5000), bits=st.integers(1, 255))
    def flip_bits(self, number: int, offset: int, bits: int) -> None:
        """Somebody changes a byte of a value."""
        name = self.one_of(number)
        if name and name not in self.damaged:

            def flip(image: bytes) -> bytes:
                at = offset % len(image)
                return image[:at] + bytes((image[at] ^ bits,)) + image[at + 1 :]

            self.change_raw(name, flip)

    @precondition(lambda self: self.harmful)
    @rule(number=st.integers(0, 100), length=st.integers(0, 300))
    def truncate(self, number: int, length: int) -> None:
        """Somebody cuts off the end of a value."""
        name = self.one_of(number)
        if name:
            self.change_raw(name, lambda image: image[:length])

    @precondition(lambda self: self.harmful)
    @rule(one=st.integers(0, 100), two=st.integers(0, 100))
    def swap(self, one: int, two: int) -> None:
        """Somebody exchanges the values of two keys."""
        first, second = self.one_of(one), self.one_of(two)
        if first and second and self._read_raw is not None:
            images = [self._read_raw(self.place, name) for name in (first, second)]
            if len(images[0]) == len(images[1]):  # the usage would be wrong otherwise
                self.change_raw(first, lambda _: images[1])
                self.change_raw(second, lambda _: images[0])

    @precondition(lambda self: self.persistent and self.heals)
    @rule()
    def remove_everything(self) -> None:
        """Somebody removes the place with all that it holds."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.removed = True

    @invariant()
    def usage_is_at_or_above_the_truth(self) -> None:
        """Whatever was done to the medium's values, the count covers them."""
        sizes = self.look()
        usage = self.engine.backend.usage()
        assert usage.bytes >= sum(sizes.values())
        assert usage.entries >= len(sizes)

    @invariant()
    def nothing_failed(self) -> None:
        """Damage is a miss and not an error."""
        if not self.removed:
            assert self.engine.stats().errors == 0


def run_cache_machine(
    open: Open,
    look: Callable[[Path], Mapping[str, int]],
    *,
    read_raw: Callable[[Path, str], bytes] | None = None,
    write_raw: Callable[[Path, str, bytes], object] | None = None,
    persistent: bool = True,
    heals: bool = True,
    exact_order: bool = True,
    settings: hypothesis.settings | None = None,
) -> None:
    """Run `CacheMachine`, if order is exact, and `HarmedMachine` over a backend.

    The arguments are those methods and attributes of a `BackendContract`, whose
    `test_an_engine_behaves_as_its_model` calls this.

    Args:
        open: opens the backend at a place.
        look: returns the stored size of each key at a place.
        read_raw: returns the bytes that the medium holds for a key; None means that nothing is
            damaged.
        write_raw: replaces them.
        persistent: values are still there when the place is opened again.
        heals: an open backend works again after its place was removed.
        exact_order: `coldest` follows the last use exactly.
        settings: Hypothesis's; by default 20 examples of 30 steps.
    """
    chosen = DEFAULTS if settings is None else settings

    class Exact(CacheMachine):
        def __init__(self) -> None:
            super().__init__(open, look, persistent=persistent)

    class Harmed(HarmedMachine):
        def __init__(self) -> None:
            super().__init__(
                open,
                look,
                read_raw=read_raw,
                write_raw=write_raw,
                persistent=persistent,
                heals=heals,
            )

    if exact_order:
        run_state_machine_as_test(Exact, settings=chosen)
    run_state_machine_as_test(Harmed, settings=chosen)
