"""The main job under pytest-benchmark: bare and cold compiles, and hits of every kind.

    pytest bench/bench_main_job.py -k cub_reduce

Ratios are the business of `ratios.py`, which interleaves what it compares.
"""

from collections.abc import Iterator

import pytest
from harness.corpus import NAMES, Case, MissingHeadersError, load
from harness.main_job import Job
from harness.raw_nvrtc import compile_case
from pytest_benchmark.fixture import BenchmarkFixture

import kcache

COMPILES = 3
PROCESSES = 10

pytest.importorskip("cuda.bindings.nvrtc", reason='needs the extra "cu13" or "cu12"')


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest) -> Case:
    try:
        return load(request.param)
    except MissingHeadersError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def job(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    job = Job(case, tmp_path_factory.mktemp(case.name))
    with job.memory_cache, job.disk_cache:
        yield job


@pytest.fixture(autouse=True)
def group(benchmark: BenchmarkFixture, job: Job) -> None:
    benchmark.group = job.case.name


def test_bare_compile(benchmark: BenchmarkFixture, job: Job) -> None:
    """The floor: NVRTC alone."""
    benchmark.pedantic(  # type: ignore[no-untyped-call]
        compile_case, (job.case,), rounds=COMPILES, warmup_rounds=1
    )


def test_cold(benchmark: BenchmarkFixture, job: Job) -> None:
    """A miss in a fresh directory: compiled, its headers followed, and stored."""

    def setup() -> tuple[tuple[kcache.KernelCache], dict[str, object]]:
        return (job.empty_cache(),), {}

    benchmark.pedantic(  # type: ignore[no-untyped-call]
        job.request, setup=setup, rounds=COMPILES
    )


def test_hot_fresh_process(benchmark: BenchmarkFixture, job: Job) -> None:
    """A hit from disk in a new process, which is timed as a whole; `extra_info` has the look-up."""
    inside: list[float] = []

    def run() -> None:
        inside.append(job.hit_in_new_process()[1])

    benchmark.pedantic(  # type: ignore[no-untyped-call]
        run, rounds=PROCESSES, warmup_rounds=1
    )
    benchmark.extra_info["look-up seconds"] = sorted(inside)[len(inside) // 2]


def test_hot_disk(benchmark: BenchmarkFixture, job: Job) -> None:
    """A hit from disk in this process, without the memory tier; every header is checked."""
    kernel = benchmark(job.request, job.disk_cache)
    assert kernel.cached


def test_hot_memory(benchmark: BenchmarkFixture, job: Job) -> None:
    """A hit from memory; every header is checked."""
    kernel = benchmark(job.request, job.memory_cache)
    assert kernel.cached
