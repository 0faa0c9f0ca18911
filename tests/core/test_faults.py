"""Failures of backends, disks and permissions are counted, and lose no entry and no kernel."""

import errno
from collections.abc import Callable

import pytest
from core.helpers import entry, key, stored_size

from kcache import BackendError, CacheEngine, CorruptEntryError
from kcache.testing import FaultyBackend

SIZE = stored_size(100)

# -- any backend ---------------------------------------------------------------------------------

ERRORS: dict[str, Callable[[], BaseException]] = {
    "BackendError": lambda: BackendError("no"),
    "CorruptEntryError": lambda: CorruptEntryError("no"),
    "EIO": lambda: OSError(errno.EIO, "no"),
    "EACCES": lambda: PermissionError(errno.EACCES, "no"),
    "MemoryError": MemoryError,
}
METHODS = ["use", "put", "delete", "touch", "usage", "coldest", "scan", "close"]
OPERATIONS: dict[str, Callable[[CacheEngine], object]] = {
    "get": lambda engine: engine.get(key(1)),
    "get nothing": lambda engine: engine.get(key(99)),
    "put": lambda engine: engine.put(key(2), entry()),
    "put at the cap": lambda engine: engine.put(key(3), entry(250)),
    "put too large": lambda engine: engine.put(key(1), entry(10_000)),
    "get_or_create": lambda engine: engine.get_or_create(key(4), entry),
    "delete": lambda engine: engine.delete(key(1)),
    "trim": lambda engine: engine.trim(0),
    "clear": lambda engine: engine.clear(),
    "size": lambda engine: (engine.size_bytes, engine.entry_count),
    "stats": lambda engine: (engine.stats(), engine.total_stats(), engine.flush()),
    "close": lambda engine: engine.close(),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("memory_size", [0, 10**6], ids=["disk", "memory"])
def test_no_error_of_a_backend_escapes(memory_size: int, method: str, error: str) -> None:
    for name, operation in OPERATIONS.items():
        now = [0.0]
        backend = FaultyBackend()
        engine = CacheEngine(
            backend, max_size=3 * SIZE, memory_size=memory_size, clock=lambda now=now: now[0]
        )
        for number in (0, 1):
            engine.put(key(number), entry())
        backend.faults[method] = ERRORS[error]()
        backend.calls.clear()
        for _ in range(2):
            operation(engine)
            now[0] += 100
        failed = backend.calls.count(method)
        counted = engine.stats().errors + engine.stats().corrupt
        if method == "close":  # no object is left that could count the failure
            failed = counted
        # `get_or_create` looks twice before it creates, but counts the damage once.
        twice = (name, method, error) == ("get_or_create", "use", "CorruptEntryError")
        assert failed == counted * (2 if twice else 1)
        backend.faults.clear()
        assert engine.put(key(5), entry())
        assert engine.get(key(5)) == entry()


def test_an_entry_whose_delete_fails_does_not_stop_the_eviction_of_others() -> None:
    class Stubborn(FaultyBackend):
        def delete(self, key_: str) -> int:
            if key_ == key(0):
                raise BackendError("immutable")
            return super().delete(key_)

    engine = CacheEngine(Stubborn(), max_size=4 * SIZE)
    for number in range(4):
        engine.put(key(number), entry())
    assert engine.put(key(4), entry())
    assert engine.get(key(4)) == entry()


def test_one_warning_for_each_failing_operation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", logger="kcache")
    backend = FaultyBackend()
    engine = CacheEngine(backend)
    backend.faults = {"use": BackendError("the disk is on fire"), "usage": OSError(5, "no")}
    for _ in range(3):
        engine.get(key(1))
        engine.put(key(1), entry())
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "the disk is on fire" in caplog.text
    assert engine.stats().errors == 6
