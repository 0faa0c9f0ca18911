"""compile_many: in order, in parallel, once each, errors as values, shared among processes."""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from core.helpers import python
from nvrtc.reference import KERNEL, PTX, compile_fresh

import kcache
from kcache import CompileRequest
from kcache.errors import ArgumentTypeError
from kcache.nvrtc import compiler

pytestmark = pytest.mark.usefixtures("nvrtc")

LONG = 60.0


def source(number: int) -> str:
    return KERNEL.replace("V", str(number))


def texts(numbers: list[int]) -> list[bytes | None]:
    return [compile_fresh(source(n), PTX.flags()).ptx for n in numbers]


def test_results_are_in_order(cache: kcache.KernelCache) -> None:
    kernels = cache.compile_many([CompileRequest(source(n), (), PTX) for n in range(4)])
    assert [k.ptx for k in kernels] == texts(list(range(4)))  # type: ignore[union-attr]
    assert [k.cached for k in kernels] == [False] * 4  # type: ignore[union-attr]
    again = cache.compile_many([CompileRequest(source(n), (), PTX) for n in (3, 9, 1)])
    assert [k.cached for k in again] == [True, False, True]  # type: ignore[union-attr]
    assert [k.ptx for k in again] == texts([3, 9, 1])  # type: ignore[union-attr]
    stats = cache.stats()
    assert (stats.compiles, stats.misses, stats.hits) == (5, 5, 2)


def test_every_form_of_a_request(cache: kcache.KernelCache) -> None:
    template = "template <int N> __global__ void t(int* out) { *out = N; }\n"
    expected = cache.get_or_compile(template, "t<1>", PTX)
    forms: list[Any] = [
        CompileRequest(template, "t<1>", PTX),
        (template, "t<1>", PTX),
        [template, ["t<1>"], PTX, None, b""],
        {"source": template, "names": ("t<1>",), "options": PTX},
    ]
    assert [k.key for k in cache.compile_many(forms)] == [expected.key] * 4  # type: ignore[union-attr]
    assert cache.compile_many([]) == []
    assert cache.compile_many(iter(forms[:1]))[0] == cache.lookup(template, "t<1>", PTX)


def test_equal_requests_compile_once(cache: kcache.KernelCache) -> None:
    numbers = [1, 2, 1, 1, 2]
    kernels = cache.compile_many([(source(n), (), PTX) for n in numbers])
    assert [k.ptx for k in kernels] == texts(numbers)  # type: ignore[union-attr]
    assert [k.cached for k in kernels] == [False, False, True, True, True]  # type: ignore[union-attr]
    stats = cache.stats()
    assert (stats.compiles, stats.misses, stats.hits) == (2, 2, 3)


def test_errors_are_values(cache: kcache.KernelCache) -> None:
    results = cache.compile_many(
        [
            (source(1), (), PTX),
            ("int x = ;", (), PTX),
            (source(2), (), PTX.replace(arch="sm_12")),
            ("int x = ;", (), PTX),
            (source(3), (), PTX),
        ]
    )
    kinds = [type(result) for result in results]
    error = kcache.CompileError
    assert kinds == [
        kcache.CompiledKernel,
        error,
        kcache.CompileOptionError,
        error,
        kcache.CompiledKernel,
    ]
    assert "expected an expression" in results[1].log
    assert cache.stats().compiles == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (7, r"requests\[1\]: expected .*, got int"),
        ((), r"requests\[1\]: expected 1 to 6 fields \(source, .*\), got 0"),
        (("a",) * 7, r"requests\[1\]: expected 1 to 6 fields \(source, .*\), got 7"),
        ({"names": "k"}, r"requests\[1\]: the field 'source' is missing"),
        (
            {"source": "x", "name": "k"},
            r"requests\[1\]: no field 'name' \(did you mean 'names'\?\); expected one of source, names",
        ),
        (("", (), PTX), r"requests\[1\]: source is empty"),
        ((b"bytes", (), PTX), r"requests\[1\]: source: expected .*, got bytes"),
        ((source(1), (), "sm_90"), r"requests\[1\]: options: expected .*, got str"),
    ],
)
def test_bad_requests_are_named(cache: kcache.KernelCache, bad: Any, message: str) -> None:
    with pytest.raises(kcache.ConfigError, match=message):
        cache.compile_many([(source(1), (), PTX), bad])
    assert cache.stats().compiles == 0


@pytest.mark.parametrize("jobs", [0, -1, 1.5, True, "2"])
def test_bad_jobs(cache: kcache.KernelCache, jobs: Any) -> None:
    with pytest.raises(kcache.ConfigError, match="jobs: expected"):
        cache.compile_many([(source(1), (), PTX)], jobs=jobs)


def test_progress_is_reported_in_the_callers_thread(cache: kcache.KernelCache) -> None:
    cache.get_or_compile(source(1), (), PTX)
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        told.append((done, total))

    asked = [(source(n), (), PTX) for n in (1, 2, 3, 3)] + [("int x = ;", (), PTX)]
    cache.compile_many(asked, jobs=2, progress=progress)
    assert told == [(n, 5) for n in range(1, 6)]


class Together:
    """A replacement of `compile_request` that waits until `count` compiles run at the same time.

    Only compiles of `sources` wait. Other compiles may come from a thread of an earlier test.
    """

    def __init__(self, count: int, sources: Iterable[str]) -> None:
        self._compile_request = compiler.compile_request
        self._barrier = threading.Barrier(count)
        self._sources = set(sources)

    def __call__(self, request: Any, *args: Any) -> Any:
        if request.source in self._sources:
            self._barrier.wait(LONG)
        return self._compile_request(request, *args)


def test_jobs(cache: kcache.KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = list(range(100, 106))
    together = Together(3, map(source, numbers))
    monkeypatch.setattr(compiler, "compile_request", together)
    kernels = cache.compile_many([(source(n), (), PTX) for n in numbers], jobs=3)
    assert [k.ptx for k in kernels] == texts(numbers)  # type: ignore[union-attr]


AT_THE_END = """
import sys, threading
import kcache
options = kcache.CompileOptions(arch="sm_80")
sources = ['extern "C" __global__ void k(int* out) { *out = %d; }' % n for n in range(4)]
def late():
    threading.main_thread().join()
    with kcache.KernelCache(sys.argv[1], compile_timeout=300) as cache:
        kernels = cache.compile_many([(source, (), options) for source in sources])
        print(len([k for k in kernels if isinstance(k, kcache.CompiledKernel)]))
threading.Thread(target=late).start()
"""


def test_a_thread_that_outlives_the_main_thread_compiles(tmp_path: Path) -> None:
    done = python(AT_THE_END, tmp_path / "cache")
    assert (done.stdout, done.stderr) == ("4\n", "")


@pytest.mark.parametrize("one", [source(1), CompileRequest(source(1), (), PTX), {}, None, 3])
def test_one_request_in_place_of_a_list(cache, one):
    with pytest.raises(
        ArgumentTypeError, match=rf"^requests: expected a list .*, got {type(one).__name__}"
    ):
        cache.compile_many(one)
