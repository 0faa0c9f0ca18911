"""Single flight with the real compiler: nobody gets a stale kernel, or another place's error."""

from __future__ import annotations

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
