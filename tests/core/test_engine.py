"""CacheEngine: the cap, evictions, what is returned, and what is counted."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from core.helpers import entry, key, stored_size, together

from kcache import Backend, BackendError, CacheEngine, ConfigError, Entry, KernelCache, open_engine
from kcache.backend import Usage
from kcache.engine.engine import TOUCH_INTERVAL
from kcache.entry import encode
from kcache.testing import FaultyBackend, MemoryBackend
from kcache.util.memory_tier import ITEM_OVERHEAD
from kcache_backends.file import FileBackend

SIZE = stored_size(100)


@pytest.fixture(params=["memory", "file"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    made = MemoryBackend() if request.param == "memory" else FileBackend(tmp_path / "file")
    yield made
    made.close()


def stored(backend: Backend) -> set[str]:
    return {info.key for info in backend.scan()}


@pytest.mark.parametrize("memory_size", [0, 10**6])
def test_another_producers_entry_is_replaced(memory_size: int, backend: Backend) -> None:
    engine = CacheEngine(backend, producer="us/2", memory_size=memory_size)
    backend.put(key(1), encode(key(1), entry(), producer=b"us/1"))
    assert engine.get(key(1)) is None
    stats = engine.stats()
    assert (stats.hits, stats.misses, stats.stale, stats.corrupt) == (0, 1, 1, 0)
    engine.put(key(1), entry(7))
    assert engine.get(key(1)) == entry(7)


# -- the cap -------------------------------------------------------------------------------------


def test_two_threads_that_put_at_once_keep_the_cap() -> None:
    class Crossing(MemoryBackend):
        """A backend whose first `usage` waits up to 0.2 seconds for a second call of `usage`."""

        def __init__(self) -> None:
            super().__init__()
            self.looks = 0
            self.two_have_looked = threading.Event()

        def usage(self) -> Usage:
            usage = super().usage()
            self.looks += 1
            if self.looks >= 2:
                self.two_have_looked.set()
            self.two_have_looked.wait(0.2)
            return usage

    backend = Crossing()
    engine = CacheEngine(backend, max_size=2 * SIZE)
    backend.put(key(0), encode(key(0), entry()))
    names = iter((key(1), key(2)))
    assert all(together(2, lambda: engine.put(next(names), entry())))
    assert sum(map(len, backend.values.values())) <= 2 * SIZE


def test_an_oversized_entry_is_rejected_and_evicts_nothing(backend: Backend) -> None:
    engine = CacheEngine(backend, max_size=3 * SIZE)
    for number in range(3):
        engine.put(key(number), entry())
    assert not engine.put(key(9), entry(3 * SIZE))
    assert stored(backend) == {key(0), key(1), key(2)}
    stats = engine.stats()
    assert (stats.rejected, stats.evictions, stats.errors) == (1, 0, 0)
    assert engine.put(key(9), entry(2 * SIZE + 100))  # as large as the cap


# -- the memory tier -----------------------------------------------------------------------------


def test_memory_answers_and_records_the_use_once_a_minute() -> None:
    now = [0.0]
    backend = FaultyBackend()
    engine = CacheEngine(backend, memory_size=10**6, clock=lambda: now[0])
    shared = entry()
    for number in (1, 2):
        engine.put(key(number), shared)
    backend.calls.clear()
    for number in (1, 2) * 5:
        assert engine.get(key(number)) == entry()
    assert "use" not in backend.calls
    assert backend.calls.count("touch") <= 1
    for _ in range(3):
        now[0] += TOUCH_INTERVAL + 1
        backend.calls.clear()
        for number in (1, 2) * 5:
            engine.get(key(number))
        assert backend.calls.count("touch") == 2  # once for each key
    assert engine.stats().memory_hits == engine.stats().hits == 40


def test_memory_keeps_the_last_used_within_its_bound() -> None:
    engine = CacheEngine(MemoryBackend(), memory_size=3 * (SIZE + ITEM_OVERHEAD))
    for number in range(3):
        engine.put(key(number), entry())
    engine.get(key(0))
    engine.put(key(3), entry())
    engine.put(key(4), entry(20_000))  # larger than `memory_size`
    for number, hits in ((0, 2), (2, 3), (3, 4), (4, 4), (1, 4)):
        assert engine.get(key(number))
        assert engine.stats().memory_hits == hits
        assert engine.memory.size_bytes <= engine.memory.max_size


# -- races between a get that fills the memory tier and changes of the entry -----------------------


CHANGES: dict[str, tuple[Callable[[CacheEngine], object], Entry | None]] = {
    "put": (lambda engine: engine.put(key(1), entry(2)), entry(2)),
    "delete": (lambda engine: engine.delete(key(1)), None),
    "clear": (lambda engine: engine.clear(), None),
    "trim": (lambda engine: engine.trim(0), None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_concurrent_get_does_not_restore_a_stale_entry_in_memory(change: str) -> None:
    backend = FaultyBackend()
    engine = CacheEngine(backend, memory_size=10**6)
    engine.put(key(1), entry(1))
    engine.memory.clear()
    work, expected = CHANGES[change]

    def meanwhile(value: bytes) -> bytes:  # the value has been read, but not yet returned
        backend.damage = None
        together(1, lambda: work(engine))
        return value

    backend.damage = meanwhile
    assert engine.get(key(1)) in (entry(1), expected)
    assert engine.get(key(1)) == expected


# -- read-only -----------------------------------------------------------------------------------


def test_read_only_serves_and_writes_nothing() -> None:
    backend = FaultyBackend()
    CacheEngine(backend).put(key(1), entry())
    now = [0.0]
    for memory_size in (0, 10**6):
        backend.calls.clear()
        engine = CacheEngine(backend, memory_size=memory_size, read_only=True, clock=lambda: now[0])
        for _ in range(3):
            assert engine.get(key(1)) == entry()
            now[0] += 100
        assert engine.get(key(2)) is None
        assert not engine.put(key(2), entry())
        assert engine.delete(key(1)) is False
        assert engine.clear() == 0
        assert engine.trim(0) == 0
        assert engine.get_or_create(key(3), entry) == entry()
        assert set(backend.calls) <= {"get", "scan", "usage", "close"}
        assert engine.stats().errors == 0
    assert [info.key for info in backend.scan()] == [key(1)]


# -- bad input -----------------------------------------------------------------------------------

BAD_KEYS = ["", "0" * 63, "0" * 65, "../" + "0" * 61, "0" * 62 + "/.", "g" * 63 + "-", None, 5]


@pytest.mark.parametrize("name", BAD_KEYS)
@pytest.mark.parametrize("memory_size", [0, 10**6])
def test_a_bad_key_is_refused(name: Any, memory_size: int) -> None:
    backend = FaultyBackend()
    engine = CacheEngine(backend, memory_size=memory_size)
    for operation in (engine.get, engine.delete, lambda k: engine.put(k, entry())):
        with pytest.raises(ConfigError, match="64"):
            operation(name)
    assert backend.calls == []


@pytest.mark.parametrize(
    "arguments", [{"max_size": 0}, {"max_size": 1.5}, {"max_size": True}, {"memory_size": -1}]
)
def test_a_bad_size_is_refused_by_name(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(ConfigError, match=f"{name}: expected"):
        CacheEngine(MemoryBackend(), **arguments)


@pytest.mark.parametrize(
    "arguments", [{"older_than": -1}, {"older_than": "soon"}, {"max_size": -1}]
)
def test_bad_bounds_of_a_trim(arguments: dict[str, Any], tmp_path: Path) -> None:
    (name,) = arguments
    with KernelCache(tmp_path) as cache:
        cache.engine.put(key(1), entry())
        with pytest.raises(ConfigError, match=f"{name}: expected"):
            cache.trim(**arguments)
        assert cache.trim(older_than="30d") == 0
        assert cache.entry_count == 1


# -- open_engine ---------------------------------------------------------------------------------


def test_open_engine_ignores_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KCACHE_MAX_SIZE", "nonsense")
    monkeypatch.setenv("KCACHE_DIR", "/nowhere")
    with open_engine(tmp_path) as engine:
        assert engine.max_size == 1 << 30


def test_opening_a_missing_backend_read_only_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BackendError):
        open_engine(tmp_path / "missing", read_only=True)
    assert not (tmp_path / "missing").exists()


# -- closing -------------------------------------------------------------------------------------


def test_use_after_close(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(
        "CRITICAL", logger="kcache"
    )  # a captured log record would keep the engine alive
    engine = open_engine(tmp_path, memory_size=10**6)
    engine.put(key(1), entry())
    engine.close()
    engine.close()
    assert engine.get(key(1)) in (None, entry())
    assert not engine.put(key(2), entry())
    engine.delete(key(1))
    engine.trim(0)
    engine.clear()
    assert (engine.size_bytes, engine.entry_count) == (0, 0)
    assert engine.stats().errors > 0
    engine.total_stats()
    engine.close()
