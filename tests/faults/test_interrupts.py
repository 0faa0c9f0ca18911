"""Interrupts: Ctrl-C in a wait or a put leaves the cache usable.

`nvrtc/test_workers.py` tests Ctrl-C in a compile.
"""

import fcntl
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from core.helpers import entry, key, together
from faults.places import held_locks, stopped

from kcache import CacheEngine, KernelCache, open_engine
from kcache.util import locks


def is_usable(engine: CacheEngine) -> None:
    """Assert that another thread can use the interrupted keys, and that nothing is damaged."""

    def use() -> None:
        assert engine.put(key(1), entry(7))
        assert engine.get(key(1)) == entry(7)
        assert engine.get_or_create(key(2), lambda: entry(8)) == entry(8)

    assert together(1, use) == [None]
    assert engine.stats().errors == engine.stats().corrupt == 0
    assert list(engine.backend.check()) == []


#: The calls in which a put spends its time, by backend.
CALLS = [("file", os, "write"), ("file", os, "replace"), ("zstd+lmdb", fcntl, "fcntl")]


@pytest.mark.parametrize(("name", "module", "call"), CALLS)
def test_an_interrupt_in_a_put_leaves_the_cache_usable(
    name: str, module: ModuleType, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)

    with open_engine(tmp_path, backend=name) as engine:
        assert engine.put(key(1), entry())
        monkeypatch.setattr(module, call, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.put(key(1), entry(5))
        assert held_locks(tmp_path, name) == 0
        assert engine.get(key(1)) in (entry(), None)
        is_usable(engine)


@pytest.mark.parametrize("leader", ["a process", "a thread"])
def test_an_interrupt_in_a_wait_leaves_the_cache_usable(leader: str, tmp_path: Path) -> None:
    begun, go = threading.Event(), threading.Event()

    def lead(stop: Callable[[], None]) -> None:
        def create() -> object:
            stop()
            return entry()

        with open_engine(tmp_path) as other:
            other.get_or_create(key(1), create)  # type: ignore[arg-type]

    with open_engine(tmp_path) as engine:

        def hang() -> None:
            engine.get_or_create(key(1), lambda: (begun.set(), go.wait(60), entry())[2])

        def interrupted() -> None:
            threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
            engine.get_or_create(key(1), entry)

        def wait_for_it() -> None:
            with pytest.raises(KeyboardInterrupt):
                interrupted()

        if leader == "a process":
            with stopped(lead):
                wait_for_it()
        else:
            thread = threading.Thread(target=hang)
            thread.start()
            assert begun.wait(60)
            wait_for_it()
            go.set()
            thread.join()
        is_usable(engine)


def test_an_interrupt_as_a_lock_is_acquired_releases_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test keeps the traceback, and with it the frames, as an interactive interpreter does."""
    real = locks._range_lock

    def interrupted(*arguments: int) -> None:
        monkeypatch.undo()
        assert real(*arguments)
        signal.raise_signal(signal.SIGINT)

    with KernelCache(tmp_path, wait=1) as cache:
        cache.engine.backend.usage()
        monkeypatch.setattr(locks, "_range_lock", interrupted)
        with pytest.raises(KeyboardInterrupt) as kept:
            cache.engine.get_or_create(key(2), entry)
        is_usable(cache.engine)
        assert (cache.stats().wait_timeouts, kept.typename) == (0, "KeyboardInterrupt")
