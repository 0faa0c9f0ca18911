"""Kernels that are loaded from cached bytes compute what numpy does, in this process and others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.corpus import MissingHeadersError, load

import kcache

pytestmark = pytest.mark.gpu

AXPY = load("trivial").source

#: D = A B on tensor cores: half inputs, float output, one warp for each 16 x 8 tile of D, through
#: mma.m16n8k16. The fragments are those of the PTX ISA, "Matrix Fragments for mma.m16n8k16 with
#: floating point type". A is m x k, B is k x n, D is m x n, all row-major; m, n and k are multiples
#: of 16, 8 and 16. No header is needed: a half is 16 bits that only the tensor core interprets.
MMA = r"""
typedef unsigned short half_bits;

__device__ unsigned pair(half_bits low, half_bits high)
{
    return static_cast<unsigned>(low) | static_cast<unsigned>(high) << 16;
}

extern "C" __global__ void __launch_bounds__(32)
mma_gemm(const half_bits* A, const half_bits* B, float* D, int m, int n, int k)
{
    const int group = threadIdx.x / 4, member = threadIdx.x % 4;
    const int row = 16 * blockIdx.y + group;
    const int column = 8 * blockIdx.x + group;  // of B
    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int first = 0; first < k; first += 16) {
        const int low = first + 2 * member, high = low + 8;  // along k
        const half_bits* upper = A + row * k;
        const half_bits* lower = upper + 8 * k;
        const unsigned a0 = pair(upper[low], upper[low + 1]);
        const unsigned a1 = pair(lower[low], lower[low + 1]);
        const unsigned a2 = pair(upper[high], upper[high + 1]);
        const unsigned a3 = pair(lower[high], lower[high + 1]);
        const unsigned b0 = pair(B[low * n + column], B[(low + 1) * n + column]);
        const unsigned b1 = pair(B[high * n + column], B[(high + 1) * n + column]);
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
    float* out = D + row * n + 8 * blockIdx.x + 2 * member;
    out[0] = d[0];
    out[1] = d[1];
    out[8 * n] = d[2];
    out[8 * n + 1] = d[3];
}
"""


def axpy(gpu: Any, handle: kcache.launch.LoadedKernel, count: int = 100_003) -> None:
    """Launches axpy and compares with numpy."""
    np = gpu.numpy
    x = np.arange(count, dtype="f4") / 7
    y = np.sin(np.arange(count, dtype="f4"))
    out = gpu.upload(y)
    handle.launch((count + 255) // 256, 256, 2.5, gpu.upload(x), out, count, stream=gpu.stream)
    np.testing.assert_allclose(gpu.download(out, "f4"), 2.5 * x + y, rtol=1e-5, atol=1e-5)


def reloaded(place: Path, *request: Any) -> kcache.CompiledKernel:
    """Returns a kernel as another process gets it: read from the disk, and not compiled."""
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
    options = kcache.CompileOptions(arch=arch, std=case.std, include_paths=case.include_dirs)
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


def matrices(gpu: Any, m: int, n: int, k: int) -> tuple[Any, Any, Any]:
    """Returns A, B as halves, and their product in float64."""
    np = gpu.numpy
    random = np.random.default_rng(4)
    a = random.standard_normal((m, k)).astype("f2")
    b = random.standard_normal((k, n)).astype("f2")
    return a, b, a.astype("f8") @ b.astype("f8")


def test_a_gemm_on_tensor_cores(
    gpu: Any, cache: kcache.KernelCache, place: Path, arch: str
) -> None:
    if gpu.capability < 80:
        pytest.skip("mma.m16n8k16 needs sm_80")
    m, n, k = 64, 40, 96
    request = (MMA, (), kcache.CompileOptions(arch=arch))
    cache.get_or_compile(*request)
    handle = reloaded(place, *request).load()
    a, b, expected = matrices(gpu, m, n, k)
    out = gpu.upload(gpu.numpy.zeros((m, n), "f4"))
    handle.launch(
        (n // 8, m // 16), 32, gpu.upload(a), gpu.upload(b), out, m, n, k, stream=gpu.stream
    )
    found = gpu.download(out, "f4").reshape(m, n)
    gpu.numpy.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_cutlass_gemm(gpu: Any, cache: kcache.KernelCache, place: Path, arch: str) -> None:
    if gpu.capability < 80:
        pytest.skip("the kernel needs sm_80")
    try:
        case = load("cutlass_gemm")
    except MissingHeadersError as error:
        pytest.skip(str(error))
    options = kcache.CompileOptions(
        arch=arch,
        std=case.std,
        include_paths=case.include_dirs,
        extra_options=case.extra_options,
    )
    request = (case.source, case.names, options)
    cache.get_or_compile(*request)
    handle = reloaded(place, *request).load()
    m, n, k = 200, 136, 72
    a, b, expected = matrices(gpu, m, n, k)
    c = gpu.numpy.ones((m, n), "f4")
    out = gpu.upload(gpu.numpy.zeros((m, n), "f4"))
    grid, block = (-(-m // 128), -(-n // 128)), 32 * (128 // 64) * (128 // 64)
    handle.launch(
        grid, block, m, n, k, 2.0, gpu.upload(a), k, gpu.upload(b), n, 0.5, gpu.upload(c), n, out, n,
        stream=gpu.stream,
    )  # fmt: skip
    found = gpu.download(out, "f4").reshape(m, n)
    gpu.numpy.testing.assert_allclose(found, 2 * expected + 0.5, rtol=1e-3, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_attention(
    gpu: Any, cache: kcache.KernelCache, place: Path, arch: str, causal: bool
) -> None:
    np = gpu.numpy
    if gpu.capability < 80:
        pytest.skip("the kernel needs sm_80")
    try:
        case = load("attention")
    except MissingHeadersError as error:
        pytest.skip(str(error))
    options = kcache.CompileOptions(arch=arch, std=case.std, include_paths=case.include_dirs)
    request = (case.source, f"attention<64, 64, 64, {str(causal).lower()}>", options)
    cache.get_or_compile(*request)
    handle = reloaded(place, *request).load()
    heads, queries, keys, size = 3, 150, 200, 64  # partial tiles of both
    random = np.random.default_rng(5)
    q, k, v = (
        random.standard_normal((heads, count, size)).astype("f2") for count in (queries, keys, keys)
    )
    scale = size**-0.5
    out = gpu.upload(np.full((heads, queries, size), np.nan, "f2"))
    uploaded = [gpu.upload(each) for each in (q, k, v)]
    handle.launch(
        (-(-queries // 64), heads), 128, *uploaded, out, queries, keys, scale, stream=gpu.stream
    )
    scores = scale * (q.astype("f8") @ k.astype("f8").transpose(0, 2, 1))
    if causal:
        i, j = np.ogrid[:queries, :keys]
        scores = np.where(j <= i + keys - queries, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    expected = weights / weights.sum(axis=2, keepdims=True) @ v.astype("f8")
    found = gpu.download(out, "f2").reshape(expected.shape)
    np.testing.assert_allclose(found, expected, rtol=5e-3, atol=5e-3)


SECOND = """
import sys
sys.path.insert(0, sys.argv[3])
from conftest import Gpu
import numpy as np
import kcache
source = open(sys.argv[2], encoding="utf-8").read()
gpu = Gpu()
with kcache.KernelCache(sys.argv[1]) as cache:
    options = kcache.CompileOptions(arch=f"sm_{gpu.capability}")
    kernel = cache.get_or_compile(source, "axpy<float>", options)
    assert kernel.cached
    assert cache.stats().compiles == 0
x = np.arange(1000, dtype="f4")
out = gpu.upload(np.ones(1000, "f4"))
kernel.load().launch(4, 256, 3.0, gpu.upload(x), out, 1000, stream=gpu.stream)
np.testing.assert_array_equal(gpu.download(out, "f4"), 3 * x + 1)
nvrtc = [name for name in sys.modules if name.startswith("kcache.nvrtc.compiler")]
assert not nvrtc, nvrtc
print("the same")
"""


def test_a_second_process_loads_without_compiling(
    gpu: Any, cache: kcache.KernelCache, place: Path, arch: str, tmp_path: Path
) -> None:
    cache.get_or_compile(AXPY, "axpy<float>", kcache.CompileOptions(arch=arch))
    source = tmp_path / "axpy.cu"
    source.write_text(AXPY, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", SECOND, place, source, Path(__file__).parent],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the same\n"


@pytest.mark.usefixtures("jit")
def test_ptx_alone_is_compiled_by_the_driver(
    gpu: Any, cache: kcache.KernelCache, arch: str
) -> None:
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


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "load-and-launch.md"


@pytest.mark.usefixtures("gpu", "arch")
def test_the_how_to_runs_as_printed() -> None:
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    done = subprocess.run(
        [sys.executable, "-c", code[1]], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0. 3. 6. 9.]\n"


def test_a_cubin_alone_is_enough(gpu: Any, cache: kcache.KernelCache, arch: str) -> None:
    kernel = cache.get_or_compile(AXPY, "axpy<float>", kcache.CompileOptions(arch=arch))
    axpy(gpu, kernel._replace(ptx=None).load())
