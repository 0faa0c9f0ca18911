"""Machine: the base of the state machines, an engine at its own place and a clock."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Protocol

import hypothesis
from hypothesis.stateful import RuleBasedStateMachine, invariant

from kcache.backend import Backend
from kcache.engine.engine import CacheEngine
from kcache.engine.eviction import EVICT_BATCH
from kcache.entry import Entry, encode
from kcache.testing._base import key
from kcache.testing.clock import FakeClock

__all__ = ["DEFAULTS", "KEYS", "SIZES", "Machine", "Open"]

#: Some keys share their first digits, most don't.
KEYS = [f"01{key(number)[2:]}" for number in range(3)] + [key(number) for number in range(9)]
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


class Open(Protocol):
    """How a machine opens its backend, as `BackendContract.open` does."""

    def __call__(self, place: Path, /, *, max_size: int, clock: Callable[[], int]) -> Backend:
        """Return the backend, opened at `place`."""
        ...


class Machine(RuleBasedStateMachine):
    """The base of the state machines: an engine over a backend at its own place, and a clock.

    Args:
        open: opens the backend.
        look: returns the stored size of each key at a place, as `BackendContract.look` does.
        read_raw: returns the bytes that the medium holds for a key; None means that nothing is
            damaged.
        write_raw: replaces them.
        persistent: values are still there when the place is opened again.
        heals: an open backend works again after its place was removed.
    """

    memory_size = 0

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
        super().__init__()
        self._open = open
        self._look = look
        self._read_raw = read_raw
        self._write_raw = write_raw
        self.harmful = read_raw is not None and write_raw is not None
        self.persistent = persistent
        self.heals = heals
        self.clock = FakeClock()
        self.random = Random(0)
        self.folder = Path(tempfile.mkdtemp(prefix="kcache-machine-"))
        self.place = self.folder / "place"
        self.cap = 1 << 20
        self.engine = self.make_engine()
        self.unit = self.reserve(Entry({"payload": bytes(100)}))
        self.cap = 8 * self.unit
        self.reopen()

    def make_engine(self) -> CacheEngine:
        """Return an engine over the backend at `place`."""
        backend = self._open(self.place, max_size=self.cap, clock=self.clock)
        return CacheEngine(backend, max_size=self.cap, memory_size=self.memory_size)

    def look(self) -> dict[str, int]:
        """Return the stored size of each key."""
        return dict(self._look(self.place))

    def teardown(self) -> None:
        """Close the engine, and remove the place."""
        self.engine.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def reopen(self) -> None:
        """Close the engine, and open another at the same place."""
        self.engine.close()
        self.engine = self.make_engine()

    def pass_time(self) -> None:
        """Let a second pass, so that the next use is later than the last."""
        self.clock.advance()

    def another(self, hundredths: int) -> Entry:
        """Return a new entry of random bytes, which can't be compressed."""
        size = hundredths * self.unit // 100
        return Entry({"payload": self.random.randbytes(size)}, {"compile_seconds": 1.0})

    def reserve(self, made: Entry) -> int:
        """Return how much room the engine makes for an entry."""
        return len(encode(KEYS[0], made)) + self.engine.backend.overhead

    @invariant()
    def the_cap_holds(self) -> None:
        """The medium never holds more than the cap."""
        assert sum(self.look().values()) <= self.cap
