"""Single flight with the real compiler: how often NVRTC runs, and that nobody gets a stale kernel."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvrtc.reference import ARCH, KERNEL, compile_fresh, write

import kcache
from kcache.nvrtc import compiler

pytestmark = pytest.mark.usefixtures("nvrtc")

LONG = 60.0
#: Takes the compiler about a second: a loop that it unrolls.
SLOW = """
extern "C" __global__ void slow(float* out, float x) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 6000; ++i)
        sum = sum * x + sinf(sum + i);
    *out = sum;
}
"""

#: Asks for a kernel from several threads, with compiles counted as they begin, in a file.
ASK = """
import os, sys, threading
import kcache
from kcache.nvrtc import compiler

place, begun, source, count = sys.argv[1:5]
compile_request = compiler.compile_request
def counted(*args):
    with open(begun, "ab", buffering=0) as file:
        file.write(b".")
    return compile_request(*args)
compiler.compile_request = counted

with open(source) as file:
    text = file.read()
options = kcache.CompileOptions(arch="sm_80", include_paths=[os.path.dirname(source)])
with kcache.KernelCache(place) as cache:
    got = []
    gate = threading.Barrier(int(count))
    def ask():
        gate.wait(60)
        got.append(cache.get_or_compile(text, (), options))
    threads = [threading.Thread(target=ask) for _ in range(int(count))]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len(got) == int(count) and len({kernel.cubin for kernel in got}) == 1
    print(got[0].key, sum(not kernel.cached for kernel in got))
"""


class Ranks:
    """Processes that ask for one kernel in the same cache."""

    def __init__(self, folder: Path, source: str) -> None:
        self.place = folder / "cache"
        self.begun = write(folder / "begun", "")
        self.source = write(folder / "inc/kernel.cu", source)

    def start(self, count: int, threads: int = 1) -> list[subprocess.Popen[str]]:
        arguments = (self.place, self.begun, self.source, threads)
        command = [sys.executable, "-c", ASK, *map(str, arguments)]
        return [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]

    def compiles_begun(self) -> int:
        return self.begun.stat().st_size

    def stats(self) -> kcache.Stats:
        with kcache.KernelCache(self.place) as cache:
            return cache.total_stats()


def finished(ranks: list[subprocess.Popen[str]]) -> list[list[str]]:
    outputs = [rank.communicate(timeout=LONG)[0].split() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks)
    return outputs


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    write(tmp_path / "inc/x.h", "// a header\n")
    return Ranks(tmp_path, f'#include "x.h"\n{SLOW}')


@pytest.mark.slow
class TestRanks:
    def test_sixteen_processes_of_eight_threads_compile_once(self, ranks: Ranks) -> None:
        outputs = finished(ranks.start(16, threads=8))
        assert ranks.compiles_begun() == 1
        assert len({key for key, _ in outputs}) == 1
        assert sorted(int(fresh) for _, fresh in outputs) == [0] * 15 + [1]
        stats = ranks.stats()
        assert (stats.compiles, stats.misses, stats.hits) == (1, 1, 127)
        assert (stats.errors, stats.stale, stats.unlocked, stats.wait_timeouts) == (0, 0, 0, 0)

    def test_a_stopped_process_is_not_waited_for_longer_than_said(
        self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (leader,) = ranks.start(1)
        while not ranks.compiles_begun():
            assert leader.poll() is None
        leader.send_signal(signal.SIGSTOP)
        try:
            monkeypatch.setenv("KCACHE_WAIT", "0.2")
            finished(ranks.start(1))
        finally:
            leader.send_signal(signal.SIGCONT)
        finished([leader])
        assert ranks.compiles_begun() == 2
        assert ranks.stats().wait_timeouts == 1


class Held:
    """Compiles that have run wait until they are let go on; each is a real one."""

    def __init__(self, compile_request: Callable[..., Any]) -> None:
        self._compile_request = compile_request
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()
        self.count = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.count += 1
        try:
            return self._compile_request(*args, **options)
        finally:
            go = self.go
            self.begun.release()
            assert go.wait(LONG)

    def reached(self, times: int = 1) -> None:
        """Waits until so many compiles are held."""
        for _ in range(times):
            assert self.begun.acquire(timeout=LONG)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    made = Held(compiler.compile_request)
    monkeypatch.setattr(compiler, "compile_request", made)
    return made


class Asking:
    """Threads that ask at the same time."""

    def __init__(self, count: int, ask: Callable[[], object]) -> None:
        self.results: list[Any] = []
        self._ask = ask
        self._asked = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert self._asked.acquire(timeout=LONG)

    def _run(self) -> None:
        self._asked.release()
        try:
            self.results.append(self._ask())
        except Exception as error:
            self.results.append(error)

    def end(self) -> list[Any]:
        for thread in self._threads:
            thread.join(LONG)
            assert not thread.is_alive()
        return self.results


def test_a_header_edited_during_the_compile_is_not_missed(
    cache: kcache.KernelCache, tmp_path: Path, held: Held
) -> None:
    """Who asks after the edit must not get what was compiled before it."""
    header = write(tmp_path / "inc/x.h", "#define V 1\n")
    options = ARCH.replace(include_paths=[header.parent])
    source = "#include <x.h>\n" + KERNEL
    first = Asking(1, lambda: cache.get_or_compile(source, (), options))
    held.reached()
    write(header, "#define V 2\n")
    later = Asking(3, lambda: cache.get_or_compile(source, (), options))
    held.go.set()
    new = compile_fresh(source, options.flags())
    assert [kernel.cubin for kernel in later.end()] == [new.cubin] * 3
    assert first.end()[0].cubin == new.cubin  # it was compiled once more


def test_an_error_of_another_place_is_not_shared(
    cache: kcache.KernelCache, tmp_path: Path, held: Held
) -> None:
    """The same request with other folders: one compiles, the other does not."""
    source = "#include <x.h>\n" + KERNEL
    bad = ARCH.replace(include_paths=[write(tmp_path / "a/x.h", "#define V no(\n").parent])
    good = ARCH.replace(include_paths=[write(tmp_path / "b/x.h", "#define V 7\n").parent])
    first = Asking(1, lambda: cache.get_or_compile(source, (), bad))
    held.reached()
    second = Asking(3, lambda: cache.get_or_compile(source, (), good))
    held.go.set()
    assert isinstance(first.end()[0], kcache.CompileError)
    expected = compile_fresh(source, good.flags()).cubin
    assert [kernel.cubin for kernel in second.end()] == [expected] * 3
