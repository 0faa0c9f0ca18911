"""Fixtures of the tests of faults: a small disk, kernels, and a check for leftovers."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from core.conftest import _nothing_is_left_behind  # noqa: F401
from dropin.conftest import libraries  # noqa: F401
from faults.places import mounted
from remote.conftest import redis_server  # noqa: F401

import kcache


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    options = ("-t", "tmpfs", "-o", "size=16m,mode=0700", "tmpfs")
    with mounted(tmp_path / "disk", *options) as place:
        yield place


OPTIONS = kcache.CompileOptions(arch="sm_80")

Kernels = dict[str, tuple[bytes | None, bytes | None]]


def fat_source(number: int, size: int) -> str:
    """Return a kernel with a table of `size` random numbers, each about 22 bytes of its entry."""
    random = Random(number)
    table = ",".join(str(random.getrandbits(32)) for _ in range(size))
    return (
        f"__device__ const unsigned table[] = {{{table}}};\n"
        f'extern "C" __global__ void k{number}(unsigned* p) {{ *p = table[threadIdx.x]; }}\n'
    )


@pytest.fixture(scope="session")
def kernels(nvrtc: tuple[int, int], long: bool) -> Kernels:
    """A mapping from sources to the results of compiles without a cache."""
    sources = [fat_source(n, 40_000 if long else 6_000) for n in range(24 if long else 7)]
    return {source: kcache.compile_to_ptx(source, OPTIONS) for source in sources}
