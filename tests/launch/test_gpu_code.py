"""What is read from PTX and CUBIN, tested with real results of NVRTC."""

import pytest
from nvrtc.reference import compile_fresh

from kcache.gpu_code import arch_of, kernels_of

SOURCE = """
// .visible .entry commented(
template <typename T> __global__ void axpy(T a, const T* x, T* y, int n) { y[0] = a * x[0] + n; }
extern "C" __device__ __noinline__ float square(float x) { return x * x; }
extern "C" __global__ void none() {}
extern "C" __global__ void calls(float* x) { x[0] = square(x[1]); }
"""
KERNELS = ["_Z4axpyIfEvT_PKS0_PS0_i", "calls", "none"]


@pytest.mark.parametrize(
    ("arch", "flag"),
    [("sm_80", ""), ("sm_90a", "--relocatable-device-code=true"), ("sm_120", ""), ("sm_120", "-G")],
)
def test_ptx_and_cubin_name_the_same_kernels(arch: str, flag: str, nvrtc: tuple[int, int]) -> None:
    if arch == "sm_120" and nvrtc < (12, 8):
        pytest.skip("sm_120 needs CUDA 12.8 or later")
    flags = [f"--gpu-architecture={arch}", *([flag] if flag else [])]
    made = compile_fresh(SOURCE, flags, names=["axpy<float>"], source_name="kernels.cu")
    assert kernels_of(made.ptx, None) == kernels_of(None, made.cubin) == KERNELS
    assert arch_of(made.ptx) == arch
    assert arch_of(None, made.cubin) == arch or nvrtc < (13, 0)


def test_invalid_code_has_no_kernels() -> None:
    for code in (None, b"", b"\x7fELF" + bytes(60), b"\xff" * 100):
        assert kernels_of(None, code) == []
        assert arch_of(code, code) is None
