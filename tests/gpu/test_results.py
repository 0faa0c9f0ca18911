"""Kernels that are loaded from cached bytes compute the same as numpy."""

from pathlib import Path
from typing import Any

import pytest
from corpus import STD, load

import kcache

pytestmark = pytest.mark.gpu

AXPY = load("trivial").source


def axpy(gpu: Any, handle: kcache.launch.LoadedKernel, count: int = 100_003) -> None:
    """Launch axpy, and compare the result with numpy."""
    np = gpu.numpy
    x = np.arange(count, dtype="f4") / 7
    y = np.sin(np.arange(count, dtype="f4"))
    out = gpu.upload(y)
    handle.launch((count + 255) // 256, 256, 2.5, gpu.upload(x), out, count, stream=gpu.stream)
    np.testing.assert_allclose(gpu.download(out, "f4"), 2.5 * x + y, rtol=1e-5, atol=1e-5)


def reloaded(place: Path, *request: Any) -> kcache.CompiledKernel:
    """Return a kernel that is read from the disk and not compiled, as in another process."""
    with kcache.KernelCache(place, memory_size=0) as cache:
        kernel = cache.get_or_compile(*request)
        assert kernel.cached
        assert cache.stats().compiles == 0
    return kernel


def test_axpy(gpu: Any, cache: kcache.KernelCache, place: Path, arch: str) -> None:
    request = (AXPY, "axpy<float>", kcache.CompileOptions(arch=arch))
    fresh = cache.get_or_compile(*request)
    assert not fresh.cached
    axpy(gpu, fresh.load())
    axpy(gpu, reloaded(place, *request).load())


def test_a_template_for_other_types(gpu: Any, cache: kcache.KernelCache, arch: str) -> None:
    np = gpu.numpy
    names = ["axpy<double>", "axpy<int>", "axpy<short>"]
    kernel = cache.get_or_compile(AXPY, names, kcache.CompileOptions(arch=arch))
    for name, dtype in zip(names, ("f8", "i4", "i2"), strict=True):
        x, y = np.arange(1000, dtype=dtype), np.ones(1000, dtype)
        out = gpu.upload(y)
        three = np.dtype(dtype).type(3)
        kernel.load(name=name).launch(4, 256, three, gpu.upload(x), out, 1000, stream=gpu.stream)
        np.testing.assert_array_equal(gpu.download(out, dtype), 3 * x + y)


@pytest.mark.usefixtures("cccl")
def test_a_cub_reduction(gpu: Any, cache: kcache.KernelCache, place: Path, arch: str) -> None:
    np = gpu.numpy
    case = load("cub_reduce")
    options = kcache.CompileOptions(arch=arch, std=STD, include_paths=case.include_paths)
    request = (case.source, case.names, options)
    cache.get_or_compile(*request)
    handle = reloaded(place, *request).load()
    count, tile = 10_000, 256 * 4
    values = np.cos(np.arange(count, dtype="f4"))
    blocks = -(-count // tile)
    out = gpu.upload(np.zeros(blocks, "f4"))
    handle.launch(blocks, 256, gpu.upload(values), out, count, stream=gpu.stream)
    padded = np.zeros(blocks * tile)
    padded[:count] = values
    expected = padded.reshape(blocks, tile).sum(axis=1)
    np.testing.assert_allclose(gpu.download(out, "f4"), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("jit")
def test_ptx_alone(gpu: Any, cache: kcache.KernelCache, arch: str) -> None:
    options = kcache.CompileOptions(arch=arch.replace("sm", "compute"))
    kernel = cache.get_or_compile(AXPY, "axpy<float>", options)
    assert kernel.cubin is None
    axpy(gpu, kernel.load())


def test_ltoir_is_linked(gpu: Any, cache: kcache.KernelCache, arch: str) -> None:
    pytest.importorskip("cuda.bindings.nvjitlink")
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        load_nvidia_dynamic_lib("nvJitLink")
    except DynamicLibNotFoundError:
        pytest.skip("nvJitLink is missing: install nvidia-nvjitlink")
    options = kcache.CompileOptions(arch=arch, lto=True)
    kernel = cache.get_or_compile(AXPY, "axpy<float>", options)
    assert kernel.ltoir is not None
    assert kernel.cubin is kernel.ptx is None
    axpy(gpu, kernel.load())
