"""What PTX and CUBIN say of themselves, on what NVRTC really returns."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from nvrtc.reference import compile_fresh

from kcache.errors import DeviceError
from kcache.launch.code import Arch, Parameter, _cubin_arch, choose, kernels_of, parameters_of
from kcache.nvrtc.compiler import Compiled

SOURCE = """
struct Small { int a; float b; char c[5]; };
struct __align__(2) Half { unsigned short bits; };
// .visible .entry commented(
template <typename T> __global__ void axpy(T a, const T* x, T* y, int n) { y[0] = a * x[0] + n; }
extern "C" __device__ __noinline__ float square(float x) { return x * x; }
extern "C" __global__ void many(bool a, char b, short c, unsigned d, long long e, double f,
                                Small s, Half h, float2 g, const Small* p)
{
    if (a) *(Small*)p = s;
}
extern "C" __global__ void none() {}
extern "C" __global__ void calls(float* x) { x[0] = square(x[1]); }
"""
MANGLED = "_Z4axpyIfEvT_PKS0_PS0_i"
KERNELS = [MANGLED, "calls", "many", "none"]


def compile_program(flags: Sequence[str], *, names: Sequence[str] = ()) -> Compiled:
    made = compile_fresh(SOURCE, flags, names=names, source_name="kernels.cu")
    return Compiled(made.ptx, made.cubin, made.ltoir, made.lowered_names, made.log, 0.0)


@pytest.fixture(scope="module", params=["sm_80", "sm_90", "sm_90a", "sm_120"])
def compiled(request: pytest.FixtureRequest, nvrtc: tuple[int, int]) -> tuple[str, Compiled]:
    if request.param == "sm_120" and nvrtc < (12, 8):
        pytest.skip("sm_120 is known since CUDA 12.8")
    flags = [f"--gpu-architecture={request.param}"]
    return request.param, compile_program(flags, names=["axpy<float>"])


def test_kernels_are_listed_alike_by_ptx_and_cubin(compiled: tuple[str, Compiled]) -> None:
    _, made = compiled
    assert kernels_of(made.ptx, None) == KERNELS
    assert kernels_of(None, made.cubin) == KERNELS
    assert made.lowered_names["axpy<float>"] == MANGLED


def test_device_functions_are_no_kernels(nvrtc: tuple[int, int]) -> None:
    flags = ["--gpu-architecture=sm_90", "--relocatable-device-code=true"]
    made = compile_program(flags, names=["axpy<float>"])
    assert b"square" in (made.cubin or b"")
    assert kernels_of(None, made.cubin) == kernels_of(made.ptx, None) == KERNELS


def test_parameters_have_the_sizes_and_kinds_of_the_source(compiled: tuple[str, Compiled]) -> None:
    _, made = compiled
    assert made.ptx is not None
    assert parameters_of(made.ptx, MANGLED) == (
        Parameter(4, "float"),
        Parameter(8, "integer"),
        Parameter(8, "integer"),
        Parameter(4, "integer"),
    )
    many = parameters_of(made.ptx, "many")
    assert many is not None
    assert [p.size for p in many] == [1, 1, 2, 4, 8, 8, 16, 2, 8, 8]
    kinds = ["integer"] * 5 + ["float", "struct", "struct", "struct", "integer"]
    assert [p.kind for p in many] == kinds
    assert parameters_of(made.ptx, "none") == ()
    assert parameters_of(made.ptx, "absent") is None


def test_line_information_and_debugging_change_nothing(nvrtc: tuple[int, int]) -> None:
    for option in ("-lineinfo", "-G"):
        made = compile_program(["-arch=sm_90", option], names=["axpy<float>"])
        assert kernels_of(made.ptx, None) == kernels_of(None, made.cubin) == KERNELS
        assert made.ptx is not None
        assert len(parameters_of(made.ptx, "many") or ()) == 10


def test_a_cubin_says_its_architecture(compiled: tuple[str, Compiled]) -> None:
    arch, made = compiled
    assert made.cubin is not None
    assert str(_cubin_arch(made.cubin)) == arch.removesuffix("a")


def code(made: Compiled, **changes: object) -> Compiled:
    return made._replace(**changes)  # type: ignore[arg-type]


def test_the_cubin_is_chosen_where_it_runs_and_ptx_elsewhere(nvrtc: tuple[int, int]) -> None:
    made = compile_program(["-arch=sm_80"])
    assert choose(made, 80) == [made.cubin, made.ptx]
    assert choose(made, 86) == [made.cubin, made.ptx]
    assert choose(made, 90) == [made.ptx]
    with pytest.raises(DeviceError, match="the kernel is for sm_80, the device is sm_75"):
        choose(made, 75)
    with pytest.raises(DeviceError, match="the kernel is for sm_80, the device is sm_90"):
        choose(code(made, ptx=None), 90)
    assert choose(code(made, cubin=None), 120) == [made.ptx]
    assert choose(code(made, ptx=None, cubin=None, ltoir=b"x"), 90) == []
    with pytest.raises(DeviceError, match="nothing to load"):
        choose(code(made, ptx=None, cubin=None), 90)


def test_what_is_specific_to_an_architecture_is_for_no_other(nvrtc: tuple[int, int]) -> None:
    made = compile_program(["-arch=sm_90a"])
    assert choose(made, 90) == [made.cubin, made.ptx]
    for device in (80, 89, 100, 120):
        with pytest.raises(DeviceError, match=f"kernel is for sm_90a, the device is sm_{device}"):
            choose(made, device)


@pytest.mark.parametrize(
    ("arch", "runs", "compiles"),
    [
        (Arch(80), {80, 86, 89}, {80, 86, 89, 90, 100, 103, 120}),
        (Arch(86), {86, 89}, {86, 89, 90, 100, 103, 120}),
        (Arch(100), {100, 103}, {100, 103, 120}),
        (Arch(100, "f"), {100, 103}, {100, 103}),
        (Arch(100, "a"), {100}, {100}),
    ],
)
def test_the_rules_of_compatibility(arch: Arch, runs: set[int], compiles: set[int]) -> None:
    devices = {75, 80, 86, 89, 90, 100, 103, 120}
    assert {device for device in devices if arch.runs_on(device)} == runs
    assert {device for device in devices if arch.compiles_for(device)} == compiles


def test_damaged_elf_lists_nothing(nvrtc: tuple[int, int]) -> None:
    cubin = compile_program(["-arch=sm_90"]).cubin
    assert cubin is not None
    for end in range(0, len(cubin), 97):
        kernels_of(None, cubin[:end])  # whatever is left: no exception
        _cubin_arch(cubin[:end])
    assert kernels_of(None, b"") == kernels_of(None, b"\x7fELF" + bytes(60)) == []
