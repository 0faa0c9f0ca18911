"""`kcache integrations`: shows which installed frameworks kcache can serve."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, NamedTuple

import click

from kcache.cli.parameters import json_option
from kcache.cli.terminal import columns, show

if TYPE_CHECKING:
    pass

_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


_RUN = "kcache run -- COMMAND"
_TRITON = "TRITON_CACHE_MANAGER=kcache.integrations.triton:CacheManager"
_DROPIN, _ADAPTER, _NOT = "the drop-in", "one line", "not covered"
_BOTH = f"{_DROPIN}, {_ADAPTER}"


class Framework(NamedTuple):
    """A framework that compiles kernels at run time, and how kcache covers it.

    Attributes:
        framework: its name.
        installed: the version that is installed here.
        tested_with: the version that kcache's tests ran with; empty if they did not run it.
        covered_by: the drop-in, one line, or nothing.
        line: what switches it on, or why it can't be.
    """

    framework: str
    installed: str
    tested_with: str
    covered_by: str
    line: str


#: Name, the distributions that may have it, and the rest as of `Framework`.
_FRAMEWORKS: tuple[tuple[str, tuple[str, ...], str, str, str], ...] = (
    ("cuda.bindings", ("cuda-bindings",), "13.5", _DROPIN, _RUN),
    (
        *("cuda.core", ("cuda-core",), "1.2.2", _BOTH),
        "program.compile(..., cache=kcache.integrations.cuda_core.ProgramCache())",
    ),
    (
        *("CuPy", ("cupy-cuda13x", "cupy-cuda12x", "cupy"), "14.2", _DROPIN),
        f"CUPY_CACHE_IN_MEMORY=1 {_RUN}",
    ),
    ("numba-cuda", ("numba-cuda",), "0.30", _DROPIN, _RUN),
    ("Triton", ("triton",), "3.6, 3.9", _ADAPTER, _TRITON),
    ("torch", ("torch",), "2.11", _BOTH, f"{_TRITON} {_RUN}"),
    ("cuda.compute", ("cuda-cccl",), "", _DROPIN, _RUN),
    ("nvmath-python", ("nvmath-python",), "", _DROPIN, _RUN),
    ("Transformer Engine", ("transformer-engine",), "", _DROPIN, _RUN),
    ("TileLang", ("tilelang",), "", _DROPIN, f"{_RUN}, with the target's NVRTC backend"),
    ("TVM", ("apache-tvm",), "0.27", _DROPIN, f"TVM_CUDA_COMPILE_MODE=nvrtc {_RUN}"),
    ("DeepGEMM", ("deep-gemm",), "", _DROPIN, f"DG_JIT_USE_NVRTC=1 {_RUN}"),
    ("cuDF", ("cudf-cu13", "cudf-cu12"), "", _DROPIN, _RUN),
    ("Warp", ("warp-lang",), "1.19", _NOT, "it has NVRTC linked statically"),
    ("FlashInfer", ("flashinfer-python",), "", _NOT, "it compiles with nvcc"),
    ("JAX", ("jax",), "", _NOT, "its cache is a private interface"),
)


def installed() -> list[Framework]:
    """Return the frameworks that are installed here, in the order of the table."""
    found: list[Framework] = []
    for name, distributions, *about in _FRAMEWORKS:
        for distribution in distributions:
            with suppress(PackageNotFoundError):
                found.append(Framework(name, version(distribution), *about))
                break
    return found


def _without_dropin(found: list[Framework], problem: str) -> list[Framework]:
    """Return what covers the frameworks if a problem keeps the drop-in from doing so."""
    if not problem:
        return found
    without = {_DROPIN: (_NOT, problem), _BOTH: (_ADAPTER, None)}
    return [
        each._replace(covered_by=covered, line=line or each.line)
        for each in found
        for covered, line in [without.get(each.covered_by, (each.covered_by, None))]
    ]


@click.command(short_help="Show which installed frameworks are covered.")
@json_option("array")
def integrations(*, as_json: bool) -> None:
    """Show the installed frameworks that compile kernels at run time, and what covers them.

    "The drop-in" is what `kcache run` and `kcache.install` put in the place of NVRTC. "One line" is
    an adapter for the framework's own hook. The last column switches it on, or says why nothing
    does. Another version than the tested one works if its interface is the same.
    """
    from kcache.doctor.program_checks import missing

    found = _without_dropin(installed(), missing())
    if as_json:
        show([each._asdict() for each in found])
    elif not found:
        show("no framework that compiles kernels at run time is installed here")
    else:
        heads = ("FRAMEWORK", "INSTALLED", "TESTED WITH", "COVERED BY", "SWITCH IT ON")
        show(columns([heads, *(tuple(field or "-" for field in each) for each in found)]))
