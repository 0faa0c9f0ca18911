"""Handles on a real GPU: which arguments arrive, when handles are stale, and which code runs.

tests/launch tests the rules with a model of the driver. These tests show that the model is right.
"""

import ctypes
from typing import Any

import pytest

import kcache
import kcache.launch
from kcache.errors import DeviceError, StaleKernelError
from kcache.util.cuda_driver import open_library

pytestmark = pytest.mark.gpu

SOURCE = r"""
template <typename T> __global__ void axpy(T a, const T* x, T* y, int n)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}

struct __align__(2) Half { unsigned short bits; };

// Writes down every argument as it arrived.
extern "C" __global__ void copies(double* out, bool a, char b, short c, unsigned d, long long e,
                                  float f, double g, Half h, const void* p)
{
    out[0] = a; out[1] = b; out[2] = c; out[3] = d; out[4] = e;
    out[5] = f; out[6] = g; out[7] = h.bits; out[8] = p == nullptr;
}

// x[n - 1], ..., x[0], by one block, through dynamic shared memory.
extern "C" __global__ void reverse(float* x, int n)
{
    extern __shared__ float kept[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) kept[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = kept[n - 1 - i];
}
"""


@pytest.fixture
def kernel(cache: kcache.KernelCache, arch: str) -> kcache.CompiledKernel:
    return cache.get_or_compile(SOURCE, "axpy<float>", kcache.CompileOptions(arch=arch))


def check_axpy(gpu: Any, handle: kcache.launch.LoadedKernel, **how: Any) -> None:
    np = gpu.numpy
    x, y = np.arange(1000, dtype="f4"), np.ones(1000, "f4")
    left, out = gpu.upload(x), gpu.upload(y)  # kept alive until the kernel has run
    handle.launch(4, 256, 2.0, left, out, 1000, **how)
    np.testing.assert_array_equal(gpu.download(out, "f4"), 2 * x + 1)


# -- arguments, memory, streams ------------------------------------------------------------------


def test_every_kind_of_number_arrives(gpu: Any, kernel: kcache.CompiledKernel) -> None:
    np = gpu.numpy
    handle = kernel.load(name="copies")
    assert [info.size for info in handle.kernel.arguments_info] == [8, 1, 1, 2, 4, 8, 4, 8, 2, 8]
    half = np.float16(1.5).view("u2")
    expected = [1, -2, -300, 4_000_000_000, -5_000_000_000, 0.5, 0.1, float(half), 1]
    for values in (
        (True, -2, -300, 4_000_000_000, -5_000_000_000, 0.5, 0.1, np.float16(1.5), None),
        (np.bool_(True), np.int8(-2), np.int16(-300), np.uint32(4_000_000_000),
         np.int64(-5_000_000_000), np.float32(0.5), np.float64(0.1), half, 0),
        (ctypes.c_bool(True), ctypes.c_byte(-2), ctypes.c_short(-300),
         ctypes.c_uint(4_000_000_000), ctypes.c_longlong(-5_000_000_000), ctypes.c_float(0.5),
         ctypes.c_double(0.1), ctypes.c_ushort(int(half)), ctypes.c_void_p(None)),
    ):  # fmt: skip
        out = gpu.upload(np.full(9, -1.0))
        handle.launch(1, 1, out, *values, stream=gpu.stream)
        np.testing.assert_array_equal(gpu.download(out, "f8"), expected)


class Shown:
    """A buffer that another library exposes through one of the standard interfaces."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer


class ByInterface(Shown):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.buffer.size // 4,),
            "typestr": "<f4",
            "data": (int(self.buffer.handle), False),
            "version": 3,
            "stream": 1,
        }


class ByDlpack(Shown):
    def __dlpack__(self, **how: Any) -> Any:
        return self.buffer.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self.buffer.__dlpack_device__()


def test_device_memory_in_every_form(gpu: Any, kernel: kcache.CompiledKernel) -> None:
    np = gpu.numpy
    handle = kernel.load()
    x, y = np.arange(1000, dtype="f4"), np.ones(1000, "f4")
    for form in (ByInterface, ByDlpack, lambda buffer: int(buffer.handle)):
        left, out = gpu.upload(x), gpu.upload(y)
        handle.launch(4, 256, 2.0, form(left), form(out), 1000, stream=gpu.stream)
        np.testing.assert_array_equal(gpu.download(out, "f4"), 2 * x + 1)


def test_streams_in_every_form(gpu: Any, kernel: kcache.CompiledKernel) -> None:
    class Foreign:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, int(gpu.stream.handle)

    handle = kernel.load()
    for stream in (None, 0, 1, 2, gpu.stream, int(gpu.stream.handle), Foreign()):
        check_axpy(gpu, handle, stream=stream)


def test_more_than_48_kib_of_shared_memory(gpu: Any, kernel: kcache.CompiledKernel) -> None:
    np = gpu.numpy
    handle = kernel.load(name="reverse")
    count = 64 * 1024 // 4
    for n in (100, count, 200):  # and then less
        x = np.arange(n, dtype="f4")
        out = gpu.upload(x)
        handle.launch(1, 256, out, n, stream=gpu.stream, shared_memory=4 * n)
        np.testing.assert_array_equal(gpu.download(out, "f4"), x[::-1])


# -- contexts that end ---------------------------------------------------------------------------


def test_after_a_reset_handles_are_stale(gpu: Any, kernel: kcache.CompiledKernel) -> None:
    handle = kernel.load()
    before = kcache.launch.generation(0)
    kcache.launch.reset(0)
    with pytest.raises(StaleKernelError, match=f"generation {before}, now {before + 1}"):
        handle.launch(1, 1, 2.0, None, None, 0)
    again = kernel.load()
    assert again.generation == kcache.launch.generation() == before + 1
    check_axpy(gpu, again)


def test_a_context_of_its_own(gpu: Any, kernel: kcache.CompiledKernel) -> None:
    """A handle works in a context that is created and destroyed directly through the driver."""
    driver = open_library()
    context, memory = ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0  # it is now current
    try:
        handle = kernel.load(name="reverse")
        assert driver.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(8)) == 0
        values = gpu.numpy.array([1, 2], "f4")
        address = ctypes.c_void_p(values.ctypes.data)
        assert driver.cuMemcpyHtoD_v2(memory, address, ctypes.c_size_t(8)) == 0
        handle.launch(1, 32, memory, 2, shared_memory=8)
        assert driver.cuMemcpyDtoH_v2(address, memory, ctypes.c_size_t(8)) == 0
        assert list(values) == [2, 1]
    finally:
        assert driver.cuCtxDestroy_v2(context) == 0
    with pytest.raises(StaleKernelError, match="is not the current one"):
        handle.launch(1, 32, memory, 2, shared_memory=8)
    check_axpy(gpu, kernel.load())


# -- other architectures and devices -------------------------------------------------------------


@pytest.mark.usefixtures("jit")
def test_another_architecture_is_refused(gpu: Any, cache: kcache.KernelCache) -> None:
    arch = "sm_80" if gpu.capability >= 90 else "sm_90"
    kernel = cache.get_or_compile(SOURCE, "axpy<float>", kcache.CompileOptions(arch=arch))
    with pytest.raises(DeviceError, match=f"on device 0, which is sm_{gpu.capability}: cubin: "):
        kernel._replace(ptx=None).load()
    if arch == "sm_80":  # the PTX runs on every later architecture
        check_axpy(gpu, kernel.load())
