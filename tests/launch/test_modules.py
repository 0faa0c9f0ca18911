"""Modules are loaded once, bounded, and the least recently used go first."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import pytest

from kcache.errors import DeviceError
from kcache.launch.code import Code
from kcache.launch.modules import Modules
from kcache.util.memory_tier import ITEM_OVERHEAD


class Source(NamedTuple):
    """A kernel's code."""

    cubin: bytes | None
    ptx: bytes | None = None
    ltoir: bytes | None = None


class Module:
    """A loaded module of 100 bytes."""

    size = 100

    def __init__(self, source: Code) -> None:
        self.source = source

    def made_of(self, source: Code) -> bool:
        return self.source.cubin == source.cubin


SIZE = Module.size + ITEM_OVERHEAD


def test_a_module_is_loaded_once() -> None:
    modules = Modules(Module)
    first = modules.get("a", Source(b"1"))
    assert modules.get("a", Source(b"1")) is first
    assert modules.get("b", Source(b"1")) is not first
    assert len(modules) == 2


def test_other_code_under_the_same_key_is_loaded_anew() -> None:
    modules = Modules(Module)
    first = modules.get("a", Source(b"1"))
    second = modules.get("a", Source(b"2"))
    assert second is not first
    assert second.source == Source(b"2")
    assert modules.get("a", Source(b"2")) is second
    assert len(modules) == 1


def test_the_least_recently_used_goes_first() -> None:
    modules = Modules(Module, max_size=2 * SIZE)
    a, b = (modules.get(name, Source(name.encode())) for name in "ab")
    assert modules.get("a", Source(b"a")) is a
    modules.get("c", Source(b"c"))
    assert modules.get("a", Source(b"a")) is a
    assert modules.get("b", Source(b"b")) is not b


def test_an_evicted_module_lives_as_long_as_it_is_referred_to() -> None:
    modules = Modules(Module, max_size=SIZE)
    kept = modules.get("a", Source(b"a"))
    dead = weakref.ref(kept)
    modules.get("b", Source(b"b"))
    gc.collect()
    assert dead() is kept
    del kept
    gc.collect()
    assert dead() is None


def test_one_that_is_larger_than_the_bound_is_loaded_and_not_kept() -> None:
    modules = Modules(Module, max_size=10)
    assert modules.get("a", Source(b"a")).source == Source(b"a")
    assert len(modules) == 0


def test_clearing_forgets_every_module() -> None:
    modules = Modules(Module)
    first = modules.get("a", Source(b"1"))
    modules.clear()
    assert len(modules) == 0
    assert modules.get("a", Source(b"1")) is not first


def in_threads(
    count: int,
    modules: Modules[Module],
    keys: list[str],
    together: Callable[[], None] | None = None,
) -> list[object]:
    """Returns what each of many threads got, which start together; then `together` is called."""
    barrier = threading.Barrier(count, together)
    got: list[object] = [None] * count

    def work(n: int) -> None:
        barrier.wait(30)
        try:
            got[n] = modules.get(keys[n % len(keys)], Source(b"1"))
        except DeviceError as error:
            got[n] = error

    threads = [threading.Thread(target=work, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return got


def test_threads_that_ask_at_once_load_once() -> None:
    loads: list[Code] = []
    entered, go = threading.Event(), threading.Event()

    def load(source: Code) -> Module:
        loads.append(source)
        entered.set()
        assert go.wait(30)
        return Module(source)

    modules = Modules(load)
    first = threading.Thread(target=modules.get, args=("a", Source(b"1")))
    first.start()
    assert entered.wait(30)
    got = in_threads(8, modules, ["a"], go.set)
    first.join(30)
    assert len(loads) == 1
    assert len({id(module) for module in got}) == 1


def test_threads_load_different_keys_at_the_same_time() -> None:
    both = threading.Barrier(2)

    def load(source: Code) -> Module:
        both.wait(30)  # breaks, and fails the test, unless the two loads overlap
        return Module(source)

    got = in_threads(2, Modules(load), ["a", "b"])
    assert [type(module) for module in got] == [Module, Module]


def test_a_failure_is_everybodys_and_is_forgotten() -> None:
    fails = [True]

    def load(source: Code) -> Module:
        if fails[0]:
            raise DeviceError("no")
        return Module(source)

    modules = Modules(load)
    assert {type(error) for error in in_threads(4, modules, ["a"])} == {DeviceError}
    assert len(modules) == 0
    fails[0] = False
    assert isinstance(modules.get("a", Source(b"1")), Module)
    with pytest.raises(KeyError):
        modules._loading["a"]  # no lock is left behind
