"""Create: what `CacheEngine.get_or_create` does on a miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kcache.engine.single_flight import Flight, Made, Work

if TYPE_CHECKING:
    from kcache.engine.engine import CacheEngine
    from kcache.entry import Entry

__all__ = ["Creator"]


class Creator:
    """Creates each missing entry once, and stores it.

    Threads, processes, crash and fork: as `Flight`.

    Args:
        engine: where the entries are found and stored.
        lock_file: see `CacheEngine`.
        wait: see `CacheEngine`.
    """

    def __init__(self, engine: CacheEngine, lock_file: str | None, *, wait: float) -> None:
        self._engine = engine
        self._flight: Flight[Entry] = Flight(lock_file, wait=wait, counters=engine.counters)

    def get(self, key: str, create: Callable[[], Entry]) -> Entry:
        """Return the entry that `create` makes, here or in another thread or process."""
        engine = self._engine
        computed: list[bool] = []

        def compute() -> Made[Entry]:
            computed.append(True)
            engine.counters.add("misses")
            entry = create()
            return Made(entry, reusable=True, stored=engine.put(key, entry))

        def adopt(entry: Entry) -> Entry:
            engine.counters.hit(entry.cost, 0.0, True)
            return entry

        try:
            return self._flight.run(key, Work(lambda: engine.find(key, again=True), compute, adopt))
        except Exception:
            if not computed:  # an error of other code
                engine.counters.add("misses")
            raise

    def close(self) -> None:
        """Close the lock file. Idempotent."""
        self._flight.close()
