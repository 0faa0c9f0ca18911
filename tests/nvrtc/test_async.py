"""Tasks and threads share compiles: cancelling harms no other task, and no result is stale."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
    """A replacement of `compile_request` that compiles, and waits for `go` before it returns."""

    def __init__(self, compile_request: Callable[..., Any]) -> None:
        self._compile_request = compile_request
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()
        self.count = 0
        self.sources: list[str] = []

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        self.sources.append(args[0].source)
        try:
            return self._compile_request(*args)
        finally:
            self.begun.release()
            assert self.go.wait(LONG)

    async def reached(self) -> None:
        while not self.begun.acquire(blocking=False):
            await asyncio.sleep(0.001)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(compiler.compile_request)
    monkeypatch.setattr(compiler, "compile_request", made)
    yield made
    made.go.set()


def test_it_returns_the_kernel_of_get_or_compile(cache: kcache.KernelCache) -> None:
    async def main() -> None:
        kernel = await cache.aget_or_compile(SEVEN, (), ARCH)
        assert kernel.cubin == compile_fresh(SEVEN, ARCH.flags()).cubin
        assert not kernel.cached
        again = await cache.aget_or_compile(SEVEN, (), ARCH)
        assert again.cached
        assert again._replace(cached=False) == kernel
        assert cache.get_or_compile(SEVEN, (), ARCH) == again

    asyncio.run(main())


def test_a_thousand_tasks_compile_once(
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
        held.go.set()
        kernels = await asyncio.gather(*tasks)
        assert len({kernel.cubin for kernel in kernels}) == 1
        assert sum(not kernel.cached for kernel in kernels) == 1
        assert all(len(kernel.dependencies) == 1 for kernel in kernels)

    asyncio.run(main())
    stats = cache.stats()
    assert held.count == 1
    assert (stats.compiles, stats.misses, stats.hits) == (1, 1, 999)


@pytest.mark.parametrize("which", [[0], [1, 2], [0, 1, 2, 3]])
def test_cancelling_one_task(cache: kcache.KernelCache, held: Held, which: list[int]) -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(cache.aget_or_compile(SEVEN, (), ARCH)) for _ in range(4)]
        await held.reached()
        for number in which:
            tasks[number].cancel()
        results = asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)
        held.go.set()
        for number, result in enumerate(await results):
            assert isinstance(result, asyncio.CancelledError) == (number in which)
        # The compile was not cancelled, and its kernel is in the cache.
        assert (await cache.aget_or_compile(SEVEN, (), ARCH)).cached

    asyncio.run(main())
    assert held.count == 1


def test_closing_while_tasks_wait(tmp_path: Path, held: Held) -> None:
    cache = kcache.KernelCache(tmp_path / "cache")

    async def main() -> None:
        tasks = [asyncio.create_task(cache.aget_or_compile(SEVEN, (), ARCH)) for _ in range(4)]
        await held.reached()
        cache.close()
        held.go.set()
        assert len({kernel.cubin for kernel in await asyncio.gather(*tasks)}) == 1
        with pytest.raises(kcache.ConfigError, match="was closed"):
            await cache.aget_or_compile(SEVEN, (), ARCH)

    asyncio.run(main())
    cache.close()


def test_closing_in_another_thread_during_the_call(
    cache: kcache.KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaving an `async with` block does the same. The call once raised AttributeError."""
    real = kcache.CompileRequest

    def close(*args: Any) -> kcache.CompileRequest:
        cache.close()
        return real(*args)

    monkeypatch.setattr("kcache.kernel_cache.CompileRequest", close)
    with pytest.raises(kcache.ConfigError, match="was closed"):
        asyncio.run(cache.aget_or_compile(SEVEN, (), ARCH))


def test_arguments_may_be_changed_after_the_call(cache: kcache.KernelCache) -> None:
    """The values at the time of the call count, also for a later request with equal values."""
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


def test_cancelled_requests_are_not_compiled(cache: kcache.KernelCache, held: Held) -> None:
    async def main() -> None:
        tasks = [
            asyncio.create_task(cache.aget_or_compile(KERNEL.replace("V", str(n)), (), ARCH))
            for n in range(100)
        ]
        await held.reached()
        assert cache._async is not None
        queued = len(cache._async._pending)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        held.go.set()
        # The queued compiles are finished, and this one comes after them in the queue.
        await cache.aget_or_compile(SEVEN, (), ARCH)
        assert held.count <= queued + 1

    asyncio.run(main())


# -- threads ---------------------------------------------------------------------------------------


def test_a_header_edit_is_noticed(cache: kcache.KernelCache, tmp_path: Path, held: Held) -> None:
    """A request after the edit must not get the kernel that was compiled before the edit."""
    header = write(tmp_path / "inc/x.h", "#define V 1\n")
    options = ARCH.replace(include_paths=[header.parent])
    source = "#include <x.h>\n" + KERNEL
    with ThreadPoolExecutor() as pool:
        first = pool.submit(cache.get_or_compile, source, (), options)
        assert held.begun.acquire(timeout=LONG)
        write(header, "#define V 2\n")
        later = [pool.submit(cache.get_or_compile, source, (), options) for _ in range(3)]
        held.go.set()
        new = compile_fresh(source, options.flags()).cubin
        # The first request was compiled again.
        assert {each.result(LONG).cubin for each in (first, *later)} == {new}


def test_tasks_share_the_error_of_a_compile_that_began_later(
    cache: kcache.KernelCache, tmp_path: Path, held: Held
) -> None:
    write(tmp_path / "n.h", "not C++\n")
    source, options = '#include "n.h"\n' + KERNEL, ARCH.replace(include_paths=[tmp_path])

    held.go.set()
    cache.get_or_compile(SEVEN, (), ARCH)
    held.go.clear()

    async def main() -> None:
        asked = [asyncio.create_task(cache.aget_or_compile(source, (), options)) for _ in range(8)]
        while source not in held.sources:
            await held.reached()
        for _ in range(3):  # look-ups run in order, so all others now wait for the compile
            await cache.aget_or_compile(SEVEN, (), ARCH)
        held.go.set()
        errors = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(error) for error in errors} == {kcache.CompileError}
        assert len({id(error) for error in errors}) == 8

    asyncio.run(main())
    assert held.sources.count(source) == 1


def test_a_loop_that_was_closed_early_is_forgotten(cache: kcache.KernelCache, held: Held) -> None:
    async def leave() -> "weakref.ref[Any]":
        asyncio.create_task(cache.aget_or_compile(SEVEN, (), ARCH))  # noqa: RUF006  is cancelled
        await held.reached()
        return weakref.ref(asyncio.get_running_loop())

    closed = asyncio.run(leave())
    held.go.set()
    asyncio.run(cache.aget_or_compile(SEVEN + "\n", (), ARCH))
    gc.collect()
    assert closed() is None


def test_errors_of_other_places(cache: kcache.KernelCache, tmp_path: Path, held: Held) -> None:
    """Of two requests that differ only in their folders, one compiles and the other does not."""
    source = "#include <x.h>\n" + KERNEL
    bad = ARCH.replace(include_paths=[write(tmp_path / "a/x.h", "#define V no(\n").parent])
    good = ARCH.replace(include_paths=[write(tmp_path / "b/x.h", "#define V 7\n").parent])
    with ThreadPoolExecutor() as pool:
        first = pool.submit(cache.get_or_compile, source, (), bad)
        assert held.begun.acquire(timeout=LONG)
        second = [pool.submit(cache.get_or_compile, source, (), good) for _ in range(3)]
        held.go.set()
        assert isinstance(first.exception(LONG), kcache.CompileError)
        expected = compile_fresh(source, good.flags()).cubin
        assert {each.result(LONG).cubin for each in second} == {expected}
