"""aget_or_compile: tasks share compiles, the loop goes on, and a cancelled task harms nobody."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nvrtc.reference import ARCH, KERNEL, compile_fresh, write

import kcache
from kcache.nvrtc import compiler

pytestmark = pytest.mark.usefixtures("nvrtc")

LONG = 60.0
SEVEN = KERNEL.replace("V", "7")


class Held:
    """Compiles that wait until the event loop lets them go on; so a loop that is blocked hangs."""

    def __init__(self, compile_request: Callable[..., Any]) -> None:
        self._compile_request = compile_request
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.count = 0

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        self.begun.release()
        assert self.go.acquire(timeout=LONG)
        return self._compile_request(*args)

    async def reached(self) -> None:
        while not self.begun.acquire(blocking=False):
            await asyncio.sleep(0.001)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(compiler.compile_request)
    monkeypatch.setattr(compiler, "compile_request", made)
    yield made
    made.go.release(1000)


def test_it_is_what_get_or_compile_returns(cache: kcache.KernelCache) -> None:
    async def main() -> None:
        kernel = await cache.aget_or_compile(SEVEN, (), ARCH)
        assert kernel.cubin == compile_fresh(SEVEN, ARCH.flags()).cubin
        assert not kernel.cached
        again = await cache.aget_or_compile(SEVEN, (), ARCH)
        assert again.cached
        assert again._replace(cached=False) == kernel
        assert cache.get_or_compile(SEVEN, (), ARCH) == again

    asyncio.run(main())


def test_a_thousand_tasks_compile_once_while_the_loop_runs(
    cache: kcache.KernelCache, tmp_path: Path, held: Held
) -> None:
    options = ARCH.replace(include_paths=[write(tmp_path / "inc/x.h", "#define V 7\n").parent])
    source = "#include <x.h>\n" + KERNEL

    async def main() -> None:
        tasks = [
            asyncio.create_task(cache.aget_or_compile(source, (), options)) for _ in range(1000)
        ]
        await held.reached()
        assert not any(task.done() for task in tasks)
        held.go.release()
        kernels = await asyncio.gather(*tasks)
        assert len({kernel.cubin for kernel in kernels}) == 1
        assert sum(not kernel.cached for kernel in kernels) == 1
        assert all(len(kernel.dependencies) == 1 for kernel in kernels)

    asyncio.run(main())
    stats = cache.stats()
    assert held.count == 1
    assert (stats.compiles, stats.misses, stats.hits) == (1, 1, 999)


@pytest.mark.parametrize("which", [[0], [1, 2], [0, 1, 2, 3]])
def test_a_cancelled_task_cancels_no_other(
    cache: kcache.KernelCache, held: Held, which: list[int]
) -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(cache.aget_or_compile(SEVEN, (), ARCH)) for _ in range(4)]
        await held.reached()
        for number in which:
            tasks[number].cancel()
        results = asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)
        held.go.release()
        for number, result in enumerate(await results):
            assert isinstance(result, asyncio.CancelledError) == (number in which)
        # The compile went on, and the cache has it.
        assert (await cache.aget_or_compile(SEVEN, (), ARCH)).cached

    asyncio.run(main())
    assert held.count == 1


def test_closing_while_tasks_wait(tmp_path: Path, held: Held) -> None:
    cache = kcache.KernelCache(tmp_path / "cache")

    async def main() -> None:
        tasks = [asyncio.create_task(cache.aget_or_compile(SEVEN, (), ARCH)) for _ in range(4)]
        await held.reached()
        cache.close()
        held.go.release(10)
        assert len({kernel.cubin for kernel in await asyncio.gather(*tasks)}) == 1
        with pytest.raises(kcache.ConfigError, match="was closed"):
            await cache.aget_or_compile(SEVEN, (), ARCH)

    asyncio.run(main())
    cache.close()


def test_arguments_may_be_changed_after_the_call(cache: kcache.KernelCache) -> None:
    """What counts is what was asked for, also for others who ask for the same then."""
    source = '#include "v.h"\ntemplate <int N> __global__ void k(int* out) { *out = V + N; }\n'

    async def main() -> None:
        headers, names = {"v.h": "#define V 1000"}, ["k<1>"]
        first = asyncio.create_task(cache.aget_or_compile(source, names, ARCH, headers=headers))
        await asyncio.sleep(0)
        headers["v.h"] = "#define V 2000"
        names[0] = "k<2>"
        same = {"v.h": "#define V 1000"}
        second = await cache.aget_or_compile(source, ["k<1>"], ARCH, headers=same)
        expected = compile_fresh(
            source, ARCH.flags(), names=["k<1>"], headers={"v.h": "#define V 1000"}
        )
        assert (await first).cubin == second.cubin == expected.cubin

    asyncio.run(main())


def test_what_nobody_waits_for_any_more_is_not_begun(cache: kcache.KernelCache, held: Held) -> None:
    async def main() -> None:
        tasks = [
            asyncio.create_task(cache.aget_or_compile(KERNEL.replace("V", str(n)), (), ARCH))
            for n in range(100)
        ]
        await held.reached()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        held.go.release(100)
        # Those that had begun end, and this one comes after them in the queue.
        await cache.aget_or_compile(SEVEN, (), ARCH)

    asyncio.run(main())
    assert held.count < 20
