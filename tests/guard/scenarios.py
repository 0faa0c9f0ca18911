"""Scenarios: what the guard measures, each prepared so that one call does nothing but itself.

A scenario prepares its place and returns the operation. Nothing in it depends on the time: the
clocks are stopped, statistics are not written in between, and a file is trusted at once though it
was written a moment ago.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import kcache
from kcache.nvrtc import files
from kcache.nvrtc.key import CacheKey

__all__ = [
    "BACKENDS",
    "HEADERS",
    "KIB",
    "PAYLOAD",
    "SCENARIOS",
    "Scenario",
    "entry",
    "key",
    "still",
]

BACKENDS = ("file", "zstd", "lmdb", "zstd+lmdb")
KIB = 1 << 10
#: Bytes of payload where nothing else is said.
PAYLOAD = 100 * KIB
#: How many headers the kernel with headers reads.
HEADERS = 5
#: A payload that does not compress, as machine code hardly does: the digests of numbers.
_NOISE = b"".join(bytes.fromhex(kcache.hash_source(str(n))) for n in range(200 * KIB // 32))

ARCH = "sm_80"
KERNEL = 'extern "C" __global__ void k(int* out) {{ *out = {}; }}\n'

Operation = Callable[[], object]


class Scenario(NamedTuple):
    """Something whose cost is counted.

    Attributes:
        name: as it stands in the tables.
        prepare: given an empty directory, prepares it and returns the operation, which can be
            repeated; what it opens is closed by the stack.
        compiler: whether it needs NVRTC.
    """

    name: str
    prepare: Callable[[Path, ExitStack], Operation]
    compiler: bool = False


def key(number: int | str) -> str:
    return kcache.hash_source(f"guard {number}")


def entry(size: int = PAYLOAD, number: int = 0) -> kcache.Entry:
    """Returns an entry with `size` bytes of payload, other ones for each number up to 100 Ki."""
    return kcache.Entry(
        {"cubin": _NOISE[number : number + size]}, {"kind": "kernel", "compile_seconds": 1.0}
    )


def still(engine: kcache.CacheEngine) -> None:
    """Stops the engine's clocks: nothing becomes due because the machine is slow."""
    engine._next_flush = float("inf")
    engine._clock = lambda: 0.0
    below: Any = engine.backend
    while below is not None:
        if hasattr(below, "_clock"):
            below._clock = itertools.count(2 * 10**18).__next__
        below = getattr(below, "inner", None)  # the backend that zstd wraps


# -- the engine ------------------------------------------------------------------------------------


def _engine(
    place: Path, stack: ExitStack, backend: str = "file", memory: int = 0
) -> kcache.CacheEngine:
    engine = stack.enter_context(
        kcache.open_engine(place, backend=backend, max_size=1 << 26, memory_size=memory)
    )
    still(engine)
    return engine


def _get(backend: str, memory: int = 0) -> Callable[[Path, ExitStack], Operation]:
    """A hit on an entry that was used before."""

    def prepare(place: Path, stack: ExitStack) -> Operation:
        engine = _engine(place, stack, backend, memory)
        name = key(0)
        assert engine.put(name, entry())
        assert engine.get(name) == entry()

        def get() -> bytes:
            found = engine.get(name)
            assert found is not None
            return found.payload["cubin"]

        return get

    return prepare


def _first_get(backend: str) -> Callable[[Path, ExitStack], Operation]:
    """A hit on an entry that this process has not used yet."""

    def prepare(place: Path, stack: ExitStack) -> Operation:
        engine = _engine(place, stack, backend)
        names = list(map(key, range(16)))
        for name in names:
            assert engine.put(name, entry(KIB))
        unused = iter(names)

        def get() -> None:
            assert engine.get(next(unused)) is not None

        return get

    return prepare


def _missing_get(backend: str) -> Callable[[Path, ExitStack], Operation]:
    def prepare(place: Path, stack: ExitStack) -> Operation:
        engine = _engine(place, stack, backend)
        engine.put(key(0), entry(KIB))

        def get() -> None:
            assert engine.get(key("missing")) is None

        return get

    return prepare


def _put(backend: str, *, new: bool) -> Callable[[Path, ExitStack], Operation]:
    """A put below the cap, into a shard that is there."""

    def prepare(place: Path, stack: ExitStack) -> Operation:
        engine = _engine(place, stack, backend)
        assert engine.put("00" + key(0)[2:], entry())
        numbers = itertools.count(1) if new else itertools.repeat(0)

        def put() -> None:
            assert engine.put("00" + key(next(numbers))[2:], entry())

        return put

    return prepare


def _delete(backend: str) -> Callable[[Path, ExitStack], Operation]:
    def prepare(place: Path, stack: ExitStack) -> Operation:
        engine = _engine(place, stack, backend)
        names = list(map(key, range(16)))
        for name in names:
            assert engine.put(name, entry(KIB))
        there = iter(names)

        def delete() -> None:
            assert engine.delete(next(there))

        return delete

    return prepare


def _open(backend: str) -> Callable[[Path, ExitStack], Operation]:
    """Opening a directory that is there, and closing it."""

    def prepare(place: Path, stack: ExitStack) -> Operation:
        def open_and_close() -> None:
            with kcache.open_engine(place, backend=backend, max_size=1 << 26):
                pass

        open_and_close()
        return open_and_close

    return prepare


def _usage(backend: str) -> Callable[[Path, ExitStack], Operation]:
    def prepare(place: Path, stack: ExitStack) -> Operation:
        engine = _engine(place, stack, backend)
        engine.put(key(0), entry(KIB))
        return engine.backend.usage

    return prepare


# -- kernels ---------------------------------------------------------------------------------------


def headers_in(folder: Path) -> str:
    """Writes the headers, each of which includes the next; returns a source that reads them all."""
    folder.mkdir()
    for number in range(HEADERS):
        more = f'#include "h{number + 1}.h"\n' if number + 1 < HEADERS else "#define V 7\n"
        (folder / f"h{number}.h").write_text(more)
    return '#include "h0.h"\n' + KERNEL.format("V")


def _kernel(
    backend: str = "file", *, headers: bool = False, memory: int | None = None
) -> Callable[[Path, ExitStack], Operation]:
    """A hit by `get_or_compile`, from memory or, without it, from the backend."""

    def prepare(place: Path, stack: ExitStack) -> Operation:
        source = headers_in(place / "inc") if headers else KERNEL.format(7)
        options = kcache.CompileOptions(arch=ARCH, include_paths=[place / "inc"])
        cache = stack.enter_context(
            kcache.KernelCache(place / "cache", backend=backend, memory_size=memory)
        )
        still(cache.engine)
        cache.get_or_compile(source, (), options)

        def hit() -> None:
            assert cache.get_or_compile(source, (), options).cached

        return hit

    return prepare


def _layer(backend: str) -> Callable[[Path, ExitStack], Operation]:
    """A hit in a layer below an empty cache, from the backend."""

    def prepare(place: Path, stack: ExitStack) -> Operation:
        source, options = KERNEL.format(7), kcache.CompileOptions(arch=ARCH)
        with kcache.KernelCache(place / "layer", backend=backend, memory_size=0) as layer:
            layer.get_or_compile(source, (), options)
        cache = stack.enter_context(
            kcache.KernelCache(
                place / "cache", backend=backend, memory_size=0, remote=f"file://{place}/layer"
            )
        )
        still(cache.engine)

        def hit() -> None:
            assert cache.get_or_compile(source, (), options).cached

        return hit

    return prepare


def _missing_lookup(place: Path, stack: ExitStack) -> Operation:
    cache = stack.enter_context(kcache.KernelCache(place / "cache"))
    still(cache.engine)
    options = kcache.CompileOptions(arch=ARCH)
    numbers = itertools.count()

    def lookup() -> None:
        assert cache.lookup(KERNEL.format(next(numbers)), (), options) is None

    return lookup


def _new_request(place: Path, stack: ExitStack) -> Operation:
    """From the arguments to the key, for a request that was not seen before."""
    cache = stack.enter_context(kcache.KernelCache(place / "cache", memory_size=0))
    options = kcache.CompileOptions(arch=ARCH, defines=["N=1"], include_paths=[place])
    source = '#include "h0.h"\n' + KERNEL.format("V")
    return lambda: cache._requests.make(source, ("k<int>",), options).key


def _open_cache(place: Path, stack: ExitStack) -> Operation:
    def open_and_close() -> None:
        with kcache.KernelCache(place / "cache"):
            pass

    open_and_close()
    return open_and_close


# -- keys ------------------------------------------------------------------------------------------


def _key(place: Path, stack: ExitStack) -> Operation:
    source = KERNEL.format(7) * 100

    def digest() -> str:
        return CacheKey(
            source_hash=kcache.hash_source(source),
            arch=ARCH,
            options_hash=kcache.hash_options(["-std=c++17", "-DN=1"]),
            compiler="nvrtc 13.0 0123456789abcdef",
            names=("k<int>",),
            outputs=("ptx", "cubin"),
        ).digest()

    return digest


def _all() -> Iterator[Scenario]:
    yield Scenario("memory: hit", _get("file", memory=1 << 24))
    for backend in BACKENDS:
        yield Scenario(f"{backend}: hit", _get(backend))
        yield Scenario(f"{backend}: first hit of a key", _first_get(backend))
        yield Scenario(f"{backend}: miss", _missing_get(backend))
        yield Scenario(f"{backend}: put", _put(backend, new=True))
        yield Scenario(f"{backend}: put again", _put(backend, new=False))
        yield Scenario(f"{backend}: delete", _delete(backend))
        yield Scenario(f"{backend}: usage", _usage(backend))
        yield Scenario(f"{backend}: open and close", _open(backend))
    yield Scenario("key", _key)
    yield Scenario("request", _new_request, compiler=True)
    yield Scenario("kernel: hit in memory", _kernel(), compiler=True)
    yield Scenario("kernel: hit in memory, headers", _kernel(headers=True), compiler=True)
    for backend in ("file", "lmdb"):
        yield Scenario(f"kernel: hit in {backend}", _kernel(backend, memory=0), compiler=True)
        headers = _kernel(backend, memory=0, headers=True)
        yield Scenario(f"kernel: hit in {backend}, headers", headers, compiler=True)
    yield Scenario("kernel: lookup that misses", _missing_lookup, compiler=True)
    yield Scenario("kernel: open and close", _open_cache, compiler=True)
    for backend in ("file", "lmdb"):
        yield Scenario(f"kernel: hit in a layer, {backend}", _layer(backend), compiler=True)


SCENARIOS = {each.name: each for each in _all()}


def trust_files_at_once() -> None:
    """Has the process trust a file by its status although it was changed a moment ago."""
    module: Any = files
    module.FRESH_NS = -(1 << 62)


def prepared(folder: Path, *, compiler: bool) -> Iterator[tuple[str, Operation]]:
    """Yields each scenario's operation, done three times already; closes what it opened."""
    for number, scenario in enumerate(SCENARIOS.values()):
        if scenario.compiler and not compiler:
            continue
        place = folder / str(number)
        os.mkdir(place, 0o700)
        with ExitStack() as stack:
            operation = scenario.prepare(place, stack)
            for _ in range(3):
                operation()
            yield scenario.name, operation
