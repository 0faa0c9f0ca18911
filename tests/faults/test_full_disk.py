"""Full disks: every compile returns its kernel, and the cache works again once there is room."""

import os
import resource
from contextlib import suppress
from pathlib import Path

import pytest
from core.helpers import in_child, key
from faults.conftest import OPTIONS, Kernels
from faults.places import (
    NAMES,
    fill,
    has,
    is_lmdb,
    leftovers,
    put_all,
    sealed,
    truth,
)

from kcache import BackendError, CompiledKernel, KernelCache, open_engine
from kcache.util import log

pytestmark = pytest.mark.parametrize("name", NAMES)

CAP = 64 << 20


# -- the real compiler -----------------------------------------------------------------------------


def compiled(cache: KernelCache, source: str, kernels: Kernels) -> CompiledKernel:
    """Return the cache's kernel for a source, and assert that it equals a plain compile."""
    kernel = cache.get_or_compile(source, (), OPTIONS)
    assert (kernel.ptx, kernel.cubin) == kernels[source]
    return kernel


@pytest.mark.timeout(900)
def test_compiles_while_the_disk_fills(name: str, disk: Path, kernels: Kernels, long: bool) -> None:
    *first, last = kernels
    with KernelCache(disk / "cache", backend=name, max_size=CAP, memory_size=0) as cache:
        ballast = fill(disk, leave=(250 if "zstd" in name else 500) << 10)
        if long:
            ballast.unlink()
        assert not any(compiled(cache, source, kernels).cached for source in first)
        assert cache.stats().errors + cache.stats().evictions > 0, "the disk was not full"
        fill(disk)
        assert not compiled(cache, last, kernels).cached
        # In reverse order, because compiling a kernel again evicts the coldest ones.
        assert any(compiled(cache, source, kernels).cached for source in reversed(first))
        assert truth(disk / "cache", name)
        ballast.unlink()
        if long:  # the cache's own entries fill the disk, so that they have to make room
            assert cache.trim(4 << 20) > 0
        for source in kernels if not long else (last, *first[:3]):
            compiled(cache, source, kernels)
            assert compiled(cache, source, kernels).cached
        assert cache.stats().corrupt == 0
        assert leftovers(disk / "cache", name) == []


def test_a_cache_opened_on_a_full_disk(name: str, disk: Path, kernels: Kernels) -> None:
    source = next(iter(kernels))
    ballast = fill(disk)
    with KernelCache(disk / "cache", backend=name, max_size=CAP, memory_size=0) as cache:
        assert not compiled(cache, source, kernels).cached
        assert not compiled(cache, source, kernels).cached
        assert cache.directory is None  # the cache works in memory only
    ballast.unlink()
    with KernelCache(disk / "cache", backend=name, max_size=CAP, memory_size=0) as cache:
        assert not compiled(cache, source, kernels).cached
        assert compiled(cache, source, kernels).cached
        assert cache.stats().hits == 1


# -- entries, on disks with more or less space -----------------------------------------------------


def test_a_disk_that_fills_while_a_cache_is_opened(name: str, disk: Path, long: bool) -> None:
    for pages in range(0, 64, 1 if long else 13):
        place = disk / str(pages)
        ballast = fill(disk, leave=4096 * pages)

        def work(place: Path = place) -> None:
            with (
                suppress(BackendError),  # the cache can't be created
                open_engine(place, backend=name, max_size=CAP) as engine,
            ):
                for number in range(3):
                    stored = bool(engine.put(key(number), sealed(number, 1, 20_000)))
                    assert has(engine, number) is stored

        def use(place: Path = place) -> None:
            with open_engine(place, backend=name, max_size=CAP) as engine:
                put_all(engine, range(3), 1, 20_000)
                assert all(has(engine, number) for number in range(3))
                assert engine.backend.usage().bytes >= sum(truth(place, name).values())

        in_child(work)
        ballast.unlink()
        in_child(use)


def test_a_disk_that_its_own_entries_fill_can_be_cleared(
    name: str, disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_logged", set())
    spare = disk / "spare"
    spare.write_bytes(bytes(128 << 10))
    with open_engine(disk / "cache", backend=name, max_size=CAP) as engine:
        for number in range(100):
            engine.put(key(number), sealed(number, 1, 400_000))
        assert engine.stats().errors + engine.stats().evictions > 0, "the disk was not full"
        assert sum(engine.get(key(number)) is not None for number in range(100)) > 10
        warnings = [each.getMessage() for each in caplog.records]
        assert sum("the disk is full" in each for each in warnings) == 1
        engine.clear()
        if is_lmdb(name) and engine.entry_count:
            # LMDB copies the pages that it changes, which is impossible without a free page.
            spare.unlink()
            engine.clear()
        assert engine.entry_count == len(truth(disk / "cache", name)) == 0
        for number in range(20):
            engine.put(key(number), sealed(number, 2, 400_000))
        held = sum(has(engine, number) for number in range(20))
        # Pages that a transaction frees can only be used by the next transaction but one.
        assert held >= (18 if is_lmdb(name) else 20)


def test_a_file_that_may_not_grow_is_a_failed_put(name: str, tmp_path: Path) -> None:
    def child() -> None:
        with open_engine(tmp_path, backend=name, max_size=CAP) as engine:
            assert engine.put(key(1), sealed(1, 1, 10_000))
            before = os.listdir("/proc/self/fd")
            for limit in (0, 4096, 8192, 20_000, 140_000):
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
                for number in range(2, 5):
                    assert not engine.put(key(number), sealed(number, 1, 400_000))
                    assert engine.get(key(number)) is None
                assert os.listdir("/proc/self/fd") == before
                assert engine.get(key(1))
                assert leftovers(tmp_path, name) == []
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            assert engine.put(key(2), sealed(2, 1, 400_000))
            assert engine.get(key(2))

    in_child(child)
