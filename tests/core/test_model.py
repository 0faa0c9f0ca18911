"""Engine and backends behave as a model does, under random operations and random damage."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from backends.suites import FileSuite, ZstdLmdbSuite
from core.helpers import LONG, QUICK, look, path_of
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
from kcache.engine.eviction import EVICT_BATCH, LOW_WATER
from kcache.entry import encode
from kcache.testing import BackendContract, FakeClock, flipped, truncated
from kcache.testing.machine import KEYS

FEW = settings(QUICK, max_examples=10, stateful_step_count=40)
MANY = settings(LONG, max_examples=150, stateful_step_count=60)

#: Sizes of payloads, from empty to larger than the cap, in hundredths of the unit. The cap is eight
#: units.
SIZES = [0, 1, 20, 20, 50, 100, 300, 900]
#: The model may ignore `EVICT_BATCH`, because it never holds that many entries.
assert len(KEYS) < EVICT_BATCH

_NAMES = st.sampled_from(KEYS)
_NUMBERS = st.integers(0, 100)
_GOALS = st.integers(0, 800)
_DAMAGES = st.one_of(
    st.builds(flipped, st.integers(0, 5000), st.integers(1, 255)),
    st.builds(truncated, st.integers(0, 300)),
)


class CacheMachine(RuleBasedStateMachine):
    """A machine that does the same with an engine and with a model, and compares them.

    The engine of an exact machine holds what an LRU map with the same cap holds. If a new entry
    does not fit, the model evicts until `LOW_WATER` of the cap is in use. In a machine that is not
    exact, values are damaged and removed, and each get returns the last value that was put, or
    nothing. Such a machine can also test backends that know the order of uses only approximately.

    Args:
        suite: opens the backend, and reads and writes its medium.

    Attributes:
        exact: whether only the engine changes the place, and `coldest` has the exact order of uses.
    """

    exact = True
    memory_size = 0

    def __init__(self, suite: BackendContract) -> None:
        super().__init__()
        self.suite = suite
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
        """Close the engine, and remove its folder."""
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
        """Return how many bytes the engine reserves for an entry."""
        return len(encode(KEYS[0], made)) + self.engine.backend.overhead

    def forget(self, name: str) -> None:
        """Remove `name` from the model, if the model has it."""
        self.model.pop(name, None)
        self.sizes.pop(name, None)

    def evict_to(self, goal: int) -> None:
        """Remove the coldest entries of an exact model until at most `goal` bytes are left."""
        while self.exact and sum(self.sizes.values()) > goal:
            self.forget(next(iter(self.model)))

    @initialize(memory_size=st.sampled_from([0, 0, 100_000]))
    def choose(self, memory_size: int) -> None:
        """Choose the memory tier's size. An exact machine has none: its hits would be no uses."""
        self.memory_size = 0 if self.exact else memory_size
        self.open_anew()

    @rule(name=_NAMES, size=st.sampled_from(SIZES))
    def put(self, name: str, size: int) -> None:
        """Put an entry. If it exceeds the cap, it is not stored, and the old entry is removed."""
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
        """Get the entry that was put last; after a miss, put an entry, as a program does.

        An entry whose value was damaged or removed is a miss, unless it is in the memory tier.
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
        """Delete an entry; the engine returns whether the entry existed."""
        there = name in self.look()
        assert self.engine.delete(name) is there or not self.exact
        self.forget(name)
        assert name not in self.look()

    @rule(hundredths=_GOALS)
    def trim(self, hundredths: int) -> None:
        """Evict the coldest entries, down to some size."""
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
        """List the entries in the order in which they would be evicted."""
        assert [info.key for info in self.engine.backend.coldest()] == list(self.model)

    @rule()
    def open_anew(self) -> None:
        """Close the engine, and open another one at the same place, which has the same order."""
        self.engine.close()
        self.engine = self.make_engine()
        if self.exact:
            self.list_the_coldest()

    # -- damage ------------------------------------------------------------------------------------

    def one_of(self, number: int) -> str | None:
        """Return one of the keys that the medium holds, or None if it holds none."""
        names = sorted(self.look())
        return names[number % len(names)] if names else None

    @precondition(lambda self: not self.exact)
    @rule(number=_NUMBERS, damage=_DAMAGES)
    def harm(self, number: int, damage: Callable[[bytes], bytes]) -> None:
        """Change a byte of a value, or cut off its end."""
        name = self.one_of(number)
        if name and name not in self.damaged:
            image = self.suite.read_raw(self.place, name)
            if damage(image) != image:
                self.suite.write_raw(self.place, name, damage(image))
                self.damaged.add(name)

    @precondition(lambda self: not self.exact)
    @rule(one=_NUMBERS, two=_NUMBERS)
    def swap(self, one: int, two: int) -> None:
        """Exchange the values of two keys, if they have the same length."""
        first, second = self.one_of(one), self.one_of(two)
        if first and second:
            images = [self.suite.read_raw(self.place, name) for name in (first, second)]
            if len(images[0]) == len(images[1]):  # otherwise the usage would be wrong
                for name, image in zip((second, first), images, strict=True):
                    self.suite.write_raw(self.place, name, image)
                self.damaged |= {first, second} if first != second else set()

    @precondition(lambda self: not self.exact)
    @rule()
    def remove_everything(self) -> None:
        """Remove the place with everything in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.removed = True

    # -- after each step ---------------------------------------------------------------------------

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        """The cap is kept. The usage covers what the medium holds; without damage, it is exact."""
        sizes, usage = self.look(), self.engine.backend.usage()
        assert sum(sizes.values()) <= min(self.cap, usage.bytes)
        assert len(sizes) <= usage.entries
        if self.exact:
            assert sizes == self.sizes
            assert usage == (sum(sizes.values()), len(sizes))

    @invariant()
    def nothing_failed(self) -> None:
        """Damage causes misses, not errors. An exact machine has neither damage nor errors."""
        stats = self.engine.stats()
        assert self.removed or stats.errors == 0
        assert not self.exact or (stats.corrupt, stats.stale) == (0, 0)


# -- over the backends -----------------------------------------------------------------------------


class Files(FileSuite):
    """The suite for a backend whose files are at the place itself."""

    def look(self, place: Path) -> dict[str, int]:
        tree = look(place)
        assert tree.temporary == []
        return tree.entries


class FilesOfACache(Files):
    """The suite for the files of a cache, which are in the folder `file` at the place."""

    def look(self, place: Path) -> dict[str, int]:
        return super().look(place / "file")

    def read_raw(self, place: Path, key: str) -> bytes:
        return super().read_raw(place / "file", key)

    def write_raw(self, place: Path, key: str, image: bytes) -> None:
        super().write_raw(place / "file", key, image)


class ExactFiles(CacheMachine):
    """A `file` backend whose directory only the engine changes."""

    def __init__(self) -> None:
        super().__init__(Files())


class ExactDatabase(CacheMachine):
    """A database of compressed values that only the engine changes."""

    def __init__(self) -> None:
        super().__init__(ZstdLmdbSuite())


class HarmedDatabase(CacheMachine):
    """A database of compressed values, some of which are damaged, exchanged or removed."""

    exact = False

    def __init__(self) -> None:
        super().__init__(ZstdLmdbSuite())


class HarmedFiles(CacheMachine):
    """A cache whose files are damaged and removed, including its counters and its statistics."""

    exact = False

    def __init__(self) -> None:
        super().__init__(FilesOfACache())

    def make_engine(self) -> CacheEngine:
        return open_engine(self.place, max_size=self.cap, memory_size=self.memory_size)

    @property
    def files(self) -> Path:
        return self.place / "file"

    @property
    def has_counters(self) -> bool:
        return (self.files / "counters").exists()

    @rule(number=st.integers(0, 100))
    def remove_a_file(self, number: int) -> None:
        name = self.one_of(number)
        if name:
            path_of(self.files, name).unlink()

    @rule(number=st.integers(0, 100))
    def remove_a_shard(self, number: int) -> None:
        name = self.one_of(number)
        if name:
            shutil.rmtree(path_of(self.files, name).parent)

    @precondition(lambda self: self.has_counters)
    @rule(junk=st.binary(max_size=64), offset=st.integers(0, 8192))
    def damage_the_counters(self, junk: bytes, offset: int) -> None:
        with (self.files / "counters").open("r+b") as file:
            file.seek(offset)
            file.write(junk)

    @precondition(lambda self: self.has_counters)
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
    def nothing_failed(self) -> None:
        """No error is counted, even if everything was removed."""
        assert self.engine.stats().errors == 0


@pytest.mark.parametrize("machine", [ExactFiles, HarmedFiles, ExactDatabase, HarmedDatabase])
def test_a_cache_behaves_as_its_model(machine: type[CacheMachine], long: bool) -> None:
    run_state_machine_as_test(machine, settings=MANY if long else FEW)
