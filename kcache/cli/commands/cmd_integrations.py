"""`kcache integrations`: shows which installed frameworks can get their kernels from kcache."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import click

from kcache.cli.parameters import json_option
from kcache.cli.terminal import columns, show
from kcache.doctor.program_checks import missing

_RUN = "kcache run -- COMMAND"
_TRITON = "TRITON_CACHE_MANAGER=kcache.integrations.triton:CacheManager"
_BY_RUN, _BY_ADAPTER, _NOT = "kcache run", "an adapter", "not supported"
_BY_BOTH = f"{_BY_RUN}, {_BY_ADAPTER}"


class Framework(NamedTuple):
    """A framework that compiles kernels at run time, and how it gets them from kcache.

    Attributes:
        framework: its name.
        installed: the version that is installed here.
        tested_with: the version that kcache's tests ran with; empty if they did not run it.
        covered_by: `kcache run`, an adapter for the framework's own hook, both or nothing.
        line: how to enable that, or why it is not possible.
    """

    framework: str
    installed: str
    tested_with: str
    covered_by: str
    line: str


#: Name, the distributions that may have it, and the rest as of `Framework`.
_FRAMEWORKS: tuple[tuple[str, tuple[str, ...], str, str, str], ...] = (
    ("cuda.bindings", ("cuda-bindings",), "13.5", _BY_RUN, _RUN),
    (
        *("cuda.core", ("cuda-core",), "1.2.2", _BY_BOTH),
        "program.compile(..., cache=kcache.integrations.cuda_core.ProgramCache())",
    ),
    (
        *("CuPy", ("cupy-cuda13x", "cupy-cuda12x", "cupy"), "14.2", _BY_RUN),
        f"CUPY_CACHE_IN_MEMORY=1 {_RUN}",
    ),
    ("numba-cuda", ("numba-cuda",), "0.30", _BY_RUN, _RUN),
    ("Triton", ("triton",), "3.6, 3.9", _BY_ADAPTER, _TRITON),
    ("torch", ("torch",), "2.11", _BY_BOTH, f"{_TRITON} {_RUN}"),
    ("cuda.compute", ("cuda-cccl",), "", _BY_RUN, _RUN),
    ("nvmath-python", ("nvmath-python",), "", _BY_RUN, _RUN),
    ("Transformer Engine", ("transformer-engine",), "", _BY_RUN, _RUN),
    ("TileLang", ("tilelang",), "", _BY_RUN, f"{_RUN}, with the target's NVRTC backend"),
    ("TVM", ("apache-tvm",), "0.27", _BY_RUN, f"TVM_CUDA_COMPILE_MODE=nvrtc {_RUN}"),
    ("DeepGEMM", ("deep-gemm",), "", _BY_RUN, f"DG_JIT_USE_NVRTC=1 {_RUN}"),
    ("cuDF", ("cudf-cu13", "cudf-cu12"), "", _BY_RUN, _RUN),
    ("FlashInfer", ("flashinfer-python",), "", _BY_RUN, _RUN),
    ("Warp", ("warp-lang",), "1.19", _NOT, "NVRTC is linked into it statically"),
    ("JAX", ("jax",), "", _NOT, "its cache is a private interface"),
)


def installed() -> list[Framework]:
    """Return the frameworks that are installed here, in the order of the table."""
    found: list[Framework] = []
    problem = missing()
    without_run = {_BY_RUN: _NOT, _BY_BOTH: _BY_ADAPTER} if problem else {}
    for name, distributions, tested, by, line in _FRAMEWORKS:
        for distribution in distributions:
            with suppress(PackageNotFoundError):
                installed_version = version(distribution)
                how = without_run.get(by, by)
                reason = problem if how != by and how == _NOT else line
                found.append(Framework(name, installed_version, tested, how, reason))
                break
    return found


@click.command(short_help="Show which installed frameworks kcache supports.")
@json_option("array")
def integrations(*, as_json: bool) -> None:
    """Show the installed frameworks that compile kernels at run time, and how kcache supports them.

    `kcache run` answers the NVRTC and nvcc calls of a program, and needs no change in it. An
    adapter is a class of kcache for the framework's own cache interface. The last column is what to
    type, or the reason why nothing helps. Other versions than the tested one work if their
    interface is the same.
    """
    found = installed()
    if as_json:
        show([each._asdict() for each in found])
    elif not found:
        show("no framework that compiles kernels at run time is installed here")
    else:
        heads = ("FRAMEWORK", "INSTALLED", "TESTED WITH", "CACHED BY", "HOW")
        show(columns([heads, *(tuple(field or "-" for field in each) for each in found)]))
