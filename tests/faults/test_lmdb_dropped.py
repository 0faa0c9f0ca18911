"""LMDB caches that nobody closes: the garbage collector drops them beside whatever goes on."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from pathlib import Path

import pytest
from core.helpers import key
from faults.places import sealed

from kcache import CacheEngine, open_engine
from kcache_backends._lmdb_environment import Environment

CAP = 1_000_000


class Cycle:
    """Rubbish that holds an engine, and that only the garbage collector finds."""

    def __init__(self, engine: CacheEngine) -> None:
        self.engine = engine
        self.itself = self


@pytest.mark.timeout(120)
@pytest.mark.parametrize("method", ["_refresh", "_open", "_locked", "_begin", "is_replaced"])
def test_a_dropped_cache_collected_in_the_middle_of_anything_ends(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    """The finalizer of one runs in a thread that opens, or writes to, the same directory."""
    real = getattr(Environment, method)
    count = 20 if long else 3
    dropped: list[weakref.ref[Cycle]] = []

    def collected(*arguments: object, **options: object) -> object:
        gc.collect()
        result = real(*arguments, **options)
        gc.collect()
        return result

    gc.disable()
    gc.freeze()  # objects of other tests are not looked at each time; all dropped objects are new
    try:
        kept = open_engine(tmp_path, backend="lmdb", max_size=CAP)
        for number in range(count):
            assert kept.put(key(number), sealed(number, 1, 2000))

        def drop() -> None:
            other = open_engine(tmp_path, backend="lmdb", max_size=CAP)
            for number in range(count):
                assert other.get(key(number))  # uses, to be written at the end
            dropped.append(weakref.ref(Cycle(other)))

        monkeypatch.setattr(Environment, method, collected)
        threads = []
        for _ in range(4 if long else 2):
            drop()
            together = threading.Barrier(3)

            def use(together: threading.Barrier = together) -> None:
                together.wait()
                for number in range(count):
                    kept.put(key(number), sealed(number, 2, 2000))
                    kept.get(key(number))

            threads = [threading.Thread(target=use, daemon=True) for _ in range(2)]
            for thread in threads:
                thread.start()
            together.wait()
            shutil.rmtree(tmp_path / "lmdb", ignore_errors=True)
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive(), "it waits for ever"
            for number in range(count):  # those beside the removal may have failed
                assert kept.put(key(number), sealed(number, 3, 2000))
            assert dropped[-1]() is None
        monkeypatch.undo()
        kept.close()
    finally:
        gc.unfreeze()
        gc.enable()
        gc.collect()
