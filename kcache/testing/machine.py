"""CacheMachine: engine and backend against a model, under random operations and random harm."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kcache.engine.engine import CacheEngine
from kcache.engine.eviction import EVICT_BATCH, LOW_WATER
from kcache.entry import Entry, encode
from kcache.testing._base import ContractBase, key
from kcache.testing.doubles import FakeClock, flipped, truncated

#: Keys that differ little, keys that share their first digits, and others.
KEYS = [
    "0" * 64,
    "0" * 63 + "1",
    "1" + "0" * 63,
    "f" * 63 + "e",
    "0f" * 32,
    "123e" * 16,
    *(f"01{key(number)[2:]}" for number in range(3)),
    *map(key, range(3)),
]
#: Sizes of payloads in hundredths of the unit, eight of which make the cap: from empty to larger
#: than the cap.
SIZES = [0, 1, 20, 20, 50, 100, 300, 900]
#: The model ignores `EVICT_BATCH`; it never holds that many entries.
assert len(KEYS) < EVICT_BATCH

DEFAULTS = hypothesis.settings(
    max_examples=20,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
)

_NAMES = st.sampled_from(KEYS)
_NUMBERS = st.integers(0, 100)
_GOALS = st.integers(0, 800)
_DAMAGES = st.one_of(
    st.builds(flipped, st.integers(0, 5000), st.integers(1, 255)),
    st.builds(truncated, st.integers(0, 300)),
)


class CacheMachine(RuleBasedStateMachine):
    """An engine over a backend at its own place, and a clock, against a model.

    An exact machine holds what an LRU map of that cap holds: to make room for an incoming entry,
    its model goes down to `LOW_WATER` of the cap. In a machine that is not exact, values are
    damaged and removed; each get returns the last value that was put, or nothing. That one also
    fits backends with an approximate order.

    Args:
        suite: opens the backend, and looks at its medium; without `write_raw`, nothing is damaged.

    Attributes:
        exact: nothing else touches the place, and `coldest` follows the last use exactly.
    """

    exact = True
    memory_size = 0

    def __init__(self, suite: ContractBase) -> None:
        super().__init__()
        self.suite = suite
        self.damages = type(suite).write_raw is not ContractBase.write_raw and not self.exact
        self.removable = suite.persistent and suite.heals and not self.exact
        self.removed = False
        self.clock = FakeClock()
        self.random = Random(0)
        self.folder = Path(tempfile.mkdtemp(prefix="kcache-machine-"))
        self.place = self.folder / "place"
        #: The last entries that were put, least recently used first, and their stored sizes.
        self.model: dict[str, Entry] = {}
        self.sizes: dict[str, int] = {}
        self.damaged: set[str] = set()
        self.cap = 1 << 20
        self.engine = self.make_engine()
        self.unit = self.reserve(Entry({"payload": bytes(100)}))
        self.cap = 8 * self.unit
        self.open_anew()

    def make_engine(self) -> CacheEngine:
        """Return an engine over the backend at `place`."""
        backend = self.suite.open(self.place, max_size=self.cap, clock=self.clock)
        return CacheEngine(backend, max_size=self.cap, memory_size=self.memory_size)

    def teardown(self) -> None:
        """Close the engine, and remove the place."""
        self.engine.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def look(self) -> dict[str, int]:
        """Return the stored size of each key."""
        return dict(self.suite.look(self.place))

    def another(self, hundredths: int) -> Entry:
        """Return a new entry of random bytes, which can't be compressed."""
        size = hundredths * self.unit // 100
        return Entry({"payload": self.random.randbytes(size)}, {"compile_seconds": 1.0})

    def reserve(self, made: Entry) -> int:
        """Return how much room the engine makes for an entry."""
        return len(encode(KEYS[0], made)) + self.engine.backend.overhead

    def forget(self, name: str) -> None:
        """Remove `name` from the model, if it is there."""
        self.model.pop(name, None)
        self.sizes.pop(name, None)

    def evict_to(self, goal: int) -> None:
        """Remove the coldest of an exact model until the rest takes `goal` bytes at most."""
        while self.exact and sum(self.sizes.values()) > goal:
            self.forget(next(iter(self.model)))

    @initialize(memory_size=st.sampled_from([0, 0, 100_000]))
    def choose(self, memory_size: int) -> None:
        """Take a memory tier, or none; an exact machine has none, whose hits are no uses."""
        self.memory_size = 0 if self.exact else memory_size
        self.open_anew()

    @rule(name=_NAMES, size=st.sampled_from(SIZES))
    def put(self, name: str, size: int) -> None:
        """Put a new entry; one that exceeds the cap replaces nothing and removes the old."""
        self.clock.advance()
        made = self.another(size)
        reserve = self.reserve(made)
        accepted = self.engine.put(name, made)
        if accepted and sum(self.sizes.values()) > self.cap - reserve:
            low = int(self.cap * LOW_WATER) - reserve
            self.evict_to(low if low >= 0 else self.cap - reserve)
        self.forget(name)
        if accepted:
            self.model[name] = made
            self.sizes[name] = self.look()[name]
            self.damaged.discard(name)
            assert self.sizes[name] <= reserve
        assert not self.exact or bool(accepted) is (reserve <= self.cap)

    @rule(name=_NAMES, size=st.sampled_from(SIZES))
    def get(self, name: str, size: int) -> None:
        """Get what was put last, and use it; what is damaged or gone at most from memory.

        What is not there is put then, as a program does.
        """
        self.clock.advance()
        sound = name in self.look() and name not in self.damaged
        found = self.engine.get(name)
        assert found == self.model.get(name) or (found is None and not sound and not self.exact)
        if found is None:
            self.put(name, size)
        elif name in self.model:
            self.model[name] = self.model.pop(name)

    @rule(name=_NAMES)
    def delete(self, name: str) -> None:
        """Delete one; the result is whether it was there."""
        there = name in self.look()
        assert self.engine.delete(name) is there or not self.exact
        self.forget(name)
        assert name not in self.look()

    @rule(hundredths=_GOALS)
    def trim(self, hundredths: int) -> None:
        """Evict the coldest, down to some size."""
        goal = hundredths * self.unit // 100
        before = sum(self.look().values())
        freed = self.engine.trim(goal)
        after = sum(self.look().values())
        assert after <= goal
        assert freed == before - after or not self.exact
        self.evict_to(goal)

    @rule()
    def clear(self) -> None:
        """Delete everything."""
        there = len(self.look())
        assert self.engine.clear() == there or not self.exact
        self.model.clear()
        self.sizes.clear()
        assert self.look() == {}

    @precondition(lambda self: self.exact)
    @rule()
    def list_the_coldest(self) -> None:
        """See the entries in the order in which they would go."""
        assert [info.key for info in self.engine.backend.coldest()] == list(self.model)

    @precondition(lambda self: self.suite.persistent)
    @rule()
    def open_anew(self) -> None:
        """Close the engine, and open another at the same place, where the order is the same."""
        self.engine.close()
        self.engine = self.make_engine()
        if self.exact:
            self.list_the_coldest()

    # -- harm --------------------------------------------------------------------------------------

    def one_of(self, number: int) -> str | None:
        """Return one of the keys that the medium holds."""
        names = sorted(self.look())
        return names[number % len(names)] if names else None

    @precondition(lambda self: self.damages)
    @rule(number=_NUMBERS, damage=_DAMAGES)
    def harm(self, number: int, damage: Callable[[bytes], bytes]) -> None:
        """A byte of a value changes, or its end is cut off."""
        name = self.one_of(number)
        if name and name not in self.damaged:
            image = self.suite.read_raw(self.place, name)
            if damage(image) != image:
                self.suite.write_raw(self.place, name, damage(image))
                self.damaged.add(name)

    @precondition(lambda self: self.damages)
    @rule(one=_NUMBERS, two=_NUMBERS)
    def swap(self, one: int, two: int) -> None:
        """The values of two keys are exchanged."""
        first, second = self.one_of(one), self.one_of(two)
        if first and second:
            images = [self.suite.read_raw(self.place, name) for name in (first, second)]
            if len(images[0]) == len(images[1]):  # the usage would be wrong otherwise
                for name, image in zip((second, first), images, strict=True):
                    self.suite.write_raw(self.place, name, image)
                self.damaged |= {first, second} if first != second else set()

    @precondition(lambda self: self.removable)
    @rule()
    def remove_everything(self) -> None:
        """The place is removed with everything in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.removed = True

    # -- after each step ---------------------------------------------------------------------------

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        """The cap holds, and the usage covers what the medium holds; exactly, without harm."""
        sizes, usage = self.look(), self.engine.backend.usage()
        assert sum(sizes.values()) <= min(self.cap, usage.bytes)
        assert len(sizes) <= usage.entries
        if self.exact:
            assert sizes == self.sizes
            assert usage == (sum(sizes.values()), len(sizes))

    @invariant()
    def nothing_failed(self) -> None:
        """Damage is a miss and not an error; without harm, there is none."""
        stats = self.engine.stats()
        assert self.removed or stats.errors == 0
        assert not self.exact or (stats.corrupt, stats.stale) == (0, 0)
