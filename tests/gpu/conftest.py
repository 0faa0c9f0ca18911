"""Fixtures: a device, a stream, and numpy arrays in device memory, by cuda.core alone.

Every module in this folder is marked `gpu`. `tests/conftest.py` skips such tests if there is no GPU.
"""

from pathlib import Path
from typing import Any

import pytest

import kcache
from kcache.util.cuda_driver import driver_version, open_library


class Gpu:
    """Device 0, which is the current device, and a stream on it."""

    def __init__(self) -> None:
        import numpy
        from cuda import core

        self.core = core
        self.numpy = numpy
        self.device = core.Device(0)
        self.device.set_current()
        self.stream = self.device.create_stream()
        self._pinned = core.LegacyPinnedMemoryResource()
        major, minor = self.device.compute_capability
        self.capability = 10 * major + minor

    def upload(self, array: Any) -> Any:
        """Copy an array into device memory, and return the cuda.core Buffer."""
        host = self._pinned.allocate(array.nbytes)
        self._bytes(host)[:] = self.numpy.frombuffer(array.tobytes(), "u1")
        buffer = self.device.allocate(array.nbytes, stream=self.stream)
        host.copy_to(buffer, stream=self.stream)
        self.stream.sync()
        return buffer

    def download(self, buffer: Any, dtype: str) -> Any:
        """Wait for all work of the current context, and return the content of a buffer."""
        assert open_library().cuCtxSynchronize() == 0
        host = self._pinned.allocate(buffer.size)
        buffer.copy_to(host, stream=self.stream)
        self.stream.sync()
        return self._bytes(host).view(dtype).copy()

    def _bytes(self, host: Any) -> Any:
        return self.numpy.from_dlpack(host).view("u1")


@pytest.fixture
def gpu() -> Gpu:
    pytest.importorskip("numpy", reason="numpy is missing: install the extra launch")
    pytest.importorskip("cuda.core", reason="cuda-core is missing: install the extra launch")
    return Gpu()


@pytest.fixture
def arch(gpu: Gpu, nvrtc: tuple[int, int]) -> str:
    """The device's architecture. The test is skipped if this NVRTC does not support it."""
    from kcache.nvrtc.compiler import hello

    if gpu.capability not in hello().archs:
        pytest.skip(f"NVRTC {nvrtc} does not support sm_{gpu.capability}")
    driver = driver_version() or (0, 0)
    if driver[0] < nvrtc[0]:
        pytest.skip(f"the driver supports CUDA {driver[0]}, but NVRTC is of CUDA {nvrtc[0]}")
    return f"sm_{gpu.capability}"


@pytest.fixture
def jit(nvrtc: tuple[int, int]) -> None:
    """Skip the test if the driver is older than NVRTC, because it can't compile newer PTX."""
    driver = driver_version() or (0, 0)
    if driver < nvrtc:
        pytest.skip(f"the driver supports CUDA {driver}, which is older than NVRTC {nvrtc}")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The directory of `cache`."""
    return tmp_path / "cache"


@pytest.fixture
def cache(place: Path) -> Any:
    with kcache.KernelCache(place) as made:
        yield made
