"""What the memory tier really holds: bytes that `tracemalloc` sees, against the tier's bound.

A cache with a small memory tier is asked for more than fits. What the tier then holds is what
clearing it lets go of: payloads, metadata, sources and whatever the cache keeps beside them.
Nothing outside the cache refers to any of it at that time.

    python bench/bench_memory_tier.py
"""

import gc
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from harness.corpus import generated_source
from pytest_benchmark.fixture import BenchmarkFixture

import kcache
from kcache.util.memory_tier import ITEM_OVERHEAD

MIB = 1 << 20
#: As many headers as the CUTLASS GEMM reads.
HEADERS = 500


@dataclass(frozen=True, slots=True)
class Held:
    """What a full tier holds.

    Attributes:
        traced: bytes that clearing it lets go of.
        bound: bytes that it may hold.
        items: entries in it.
        overhead: bytes per entry beside its envelope, which is what `ITEM_OVERHEAD` stands for;
            None where the tier holds other things than entries.
    """

    traced: int
    bound: int
    items: int
    overhead: float | None = None


def entries(size: int, bound: int = 4 * MIB) -> Held:
    """Fills the tier of a `CacheEngine` with entries of `size` bytes of payload, read from disk."""
    count = min(2 * bound // (size + ITEM_OVERHEAD), 4096)
    keys = [kcache.hash_source(f"{size} {number}") for number in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        with kcache.open_engine(folder) as engine:
            for number, key in enumerate(keys):
                engine.put(key, _entry(size, number))
        with kcache.open_engine(folder, memory_size=bound) as engine:
            engine.get(keys[0])
            with _tracing():
                if not all(_is_there(engine, key, size) for key in keys):
                    raise RuntimeError("an entry is gone")
                items, charged = len(engine.memory), engine.memory.size_bytes
                traced = _released(engine.memory.clear)
    return Held(traced, bound, items, (traced - charged) / items + ITEM_OVERHEAD)


def plain_kernels(bound: int = MIB // 2, count: int = 100) -> Held:
    """Fills the tier of a `KernelCache` with kernels of 4 KB of source that include nothing."""
    options = kcache.CompileOptions(arch="sm_90")
    return _kernels(bound, count, lambda number: generated_source(4096, number).source, options)


def header_kernels(bound: int = 2 * MIB, count: int = 30) -> Held:
    """Fills the tier of a `KernelCache` with kernels that each read 500 small headers."""
    with tempfile.TemporaryDirectory() as folder:
        names = [f"header_{number}.cuh" for number in range(HEADERS)]
        for name in names:
            (Path(folder) / name).write_text("#pragma once\n", encoding="utf-8")
        includes = "".join(f"#include <{name}>\n" for name in names)
        options = kcache.CompileOptions(arch="sm_90", include_paths=[folder])

        def source(number: int) -> str:
            return f'{includes}extern "C" __global__ void k(int* x) {{ *x = {number}; }}\n'

        return _kernels(bound, count, source, options)


#: Maps the names of populations to the populations.
POPULATIONS: dict[str, Callable[[], Held]] = {
    "entries of 1 KiB": partial(entries, 1 << 10),
    "entries of 10 KiB": partial(entries, 10 << 10),
    "entries of 100 KiB": partial(entries, 100 << 10),
    "kernels without headers": plain_kernels,
    "kernels with 500 headers": header_kernels,
}


def _is_there(engine: kcache.CacheEngine, key: str, size: int) -> bool:
    entry = engine.get(key)
    return entry is not None and entry.size >= size


def _entry(size: int, number: int) -> kcache.Entry:
    """Returns an entry with the metadata of a usual kernel, and other bytes than any other one."""
    name, lowered = f"scale<float, {number}>", f"_Z5scaleIfLi{number}EEvPT_"
    return kcache.Entry(
        {"cubin": number.to_bytes(8, "little") * (size // 8)},
        {
            "kind": "kernel",
            "compile_seconds": 1.25,
            "lowered_names": {name: lowered},
            "log": "",
            "source_name": "kernel.cu",
            "names": [name],
            "arch": "sm_90",
            "flags": ["--gpu-architecture=sm_90", "--std=c++17"],
            "created": 1.7e9 + number,
        },
    )


def _kernels(
    bound: int, count: int, source: Callable[[int], str], options: kcache.CompileOptions
) -> Held:
    with tempfile.TemporaryDirectory() as folder:
        with kcache.KernelCache(folder) as cache:
            for number in range(count):
                cache.get_or_compile(source(number), (), options)
        with kcache.KernelCache(folder, memory_size=bound) as cache:
            # The first hits load everything that a process loads once, and look at every header.
            cache.get_or_compile(source(0), (), options)
            cache.clear_memory()
            with _tracing():
                for number in range(count):
                    if not cache.get_or_compile(source(number), (), options).cached:
                        raise RuntimeError("a kernel is gone")
                items = len(cache.engine.memory)
                return Held(_released(cache.clear_memory), bound, items)


@contextmanager
def _tracing() -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def _released(clear: Callable[[], object]) -> int:
    """Returns the bytes that `clear` lets go of."""
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    clear()
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    return before - after


@pytest.mark.parametrize("population", POPULATIONS)
def test_held(benchmark: BenchmarkFixture, population: str) -> None:
    """Times a fill of the tier, traced; the bytes are in `extra_info`."""
    benchmark.group = "memory tier: fill, under tracemalloc"
    if "kernels" in population:
        pytest.importorskip("cuda.bindings.nvrtc", reason='needs the extra "cu13" or "cu12"')
    held = benchmark.pedantic(  # type: ignore[no-untyped-call]
        POPULATIONS[population], rounds=1
    )
    benchmark.extra_info.update(
        held=held.traced, bound=held.bound, items=held.items, overhead=held.overhead
    )


def main() -> None:
    print(f"Bytes. ITEM_OVERHEAD is {ITEM_OVERHEAD}.")
    row = "{:26} {:>6} {:>11} {:>11} {:>11} {:>9}".format
    print(row("filled with", "items", "held", "bound", "held/bound", "overhead"))
    for name, measure in POPULATIONS.items():
        held = measure()
        ratio = f"{held.traced / held.bound:.2f}"
        overhead = "" if held.overhead is None else f"{held.overhead:.0f}"
        print(row(name, held.items, f"{held.traced:,}", f"{held.bound:,}", ratio, overhead))


if __name__ == "__main__":
    main()
