"""Frameworks that compile kernels at run time: which are installed, and what covers them."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

_RUN = "kcache run -- COMMAND"
_DROPIN, _ADAPTER, _NOT = "the drop-in", "one line", "not covered"


class Framework(NamedTuple):
    """A framework, and how kcache covers it.

    Attributes:
        name: its own.
        distributions: the distributions that may have it.
        tested: the version that kcache's tests ran with; empty if they did not run it.
        covered: by the drop-in, by one line, or not.
        line: what switches it on, or why it can't be.
    """

    name: str
    distributions: tuple[str, ...]
    tested: str
    covered: str
    line: str


class Installed(NamedTuple):
    """A framework that is installed here, its version, and the rest as of `Framework`."""

    framework: str
    installed: str
    tested_with: str
    covered_by: str
    line: str


FRAMEWORKS = (
    Framework("cuda.bindings", ("cuda-bindings",), "13.5", _DROPIN, _RUN),
    Framework(
        "cuda.core",
        ("cuda-core",),
        "1.2.2",
        f"{_DROPIN}, {_ADAPTER}",
        "program.compile(..., cache=kcache.integrations.cuda_core.ProgramCache())",
    ),
    Framework(
        "CuPy",
        ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        "14.2",
        _DROPIN,
        f"CUPY_CACHE_IN_MEMORY=1 {_RUN}",
    ),
    Framework("numba-cuda", ("numba-cuda",), "0.30", _DROPIN, _RUN),
    Framework(
        "Triton",
        ("triton",),
        "3.9",
        _ADAPTER,
        "TRITON_CACHE_MANAGER=kcache.integrations.triton:CacheManager",
    ),
    Framework(
        "torch",
        ("torch",),
        "",
        f"{_DROPIN}, {_ADAPTER}",
        f"TRITON_CACHE_MANAGER=kcache.integrations.triton:CacheManager {_RUN}",
    ),
    Framework("cuda.compute", ("cuda-cccl",), "", _DROPIN, _RUN),
    Framework("nvmath-python", ("nvmath-python",), "", _DROPIN, _RUN),
    Framework("Transformer Engine", ("transformer-engine",), "", _DROPIN, _RUN),
    Framework("TileLang", ("tilelang",), "", _DROPIN, f"{_RUN}, with the target's NVRTC backend"),
    Framework("TVM", ("apache-tvm",), "0.27", _DROPIN, f"TVM_CUDA_COMPILE_MODE=nvrtc {_RUN}"),
    Framework("DeepGEMM", ("deep-gemm",), "", _DROPIN, f"DG_JIT_USE_NVRTC=1 {_RUN}"),
    Framework("cuDF", ("cudf-cu13", "cudf-cu12"), "", _DROPIN, _RUN),
    Framework("Warp", ("warp-lang",), "1.19", _NOT, "it has NVRTC linked statically"),
    Framework("FlashInfer", ("flashinfer-python",), "", _NOT, "it compiles with nvcc"),
    Framework("JAX", ("jax",), "", _NOT, "its cache is a private interface"),
)


def installed() -> list[Installed]:
    """Return the frameworks that are installed here, in the order of `FRAMEWORKS`."""
    found: list[Installed] = []
    for each in FRAMEWORKS:
        for distribution in each.distributions:
            with suppress(PackageNotFoundError):
                here = version(distribution)
                found.append(Installed(each.name, here, each.tested, each.covered, each.line))
                break
    return found
