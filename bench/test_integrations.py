"""Integrations: the adapters for cuda.core and Triton, beside the caches that these have."""

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
from contenders import KIB, needs, noise
from keep import Keep

COUNT = 64
#: What Triton stores for a kernel.
FILES = ("k.source", "k.ttir", "k.ttgir", "k.llir", "k.ptx", "k.cubin", "k.json")


@pytest.mark.beside("cuda.core: get of {kib} KiB", "{contender}")
@pytest.mark.parametrize(
    "contender", ["kcache ProgramCache", "kcache ProgramCache, memory", "FileStreamProgramCache"]
)
@pytest.mark.parametrize("kib", [100])
def test_cuda_core(benchmark: Any, keep: Keep, contender: str, kib: int) -> None:
    cache = keep(_cuda_core, contender, kib)
    names = itertools.cycle(map(str, range(COUNT)))
    benchmark(lambda: cache.get(next(names)))


def _cuda_core(keep: Keep, contender: str, kib: int) -> Any:
    (utils,) = needs("cuda.core.utils")
    from kcache.integrations.cuda_core import ProgramCache

    with pytest.MonkeyPatch.context() as patch:
        if contender == "kcache ProgramCache":
            patch.setenv("KCACHE_MEMORY_SIZE", "0")
        kind = ProgramCache if "kcache" in contender else utils.FileStreamProgramCache
        cache = kind(keep.folder())
    for number in range(COUNT):
        cache[str(number)] = noise(number, kib * KIB)
    return cache


@pytest.mark.beside("Triton: get_group on a hit", "{contender}")
@pytest.mark.parametrize("contender", ["kcache CacheManager", "Triton FileCacheManager"])
def test_triton(benchmark: Any, keep: Keep, contender: str) -> None:
    benchmark(keep(_triton, contender))


def _triton(keep: Keep, contender: str) -> Callable[[], object]:
    module, knobs, adapter = needs(
        "triton.runtime.cache", "triton.knobs", "kcache.integrations.triton"
    )
    ours = "kcache" in contender
    kind = adapter.CacheManager if ours else module.FileCacheManager
    folder = str(keep.folder())
    os.environ["KCACHE_DIR"] = str(keep.place / "kcache")
    knobs.cache.dir = folder
    for number in range(COUNT):
        made = kind(f"K{number}")
        group = {name: made.put(noise(number, 5 * KIB), name) for name in FILES}
        made.put_group("k.json", group)
    numbers = itertools.cycle(range(COUNT))

    def get() -> object:
        knobs.cache.dir = folder
        return kind(f"K{next(numbers)}").get_group("k.json")

    if not get():
        raise RuntimeError("not a hit")
    return get
