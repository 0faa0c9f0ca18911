"""`kcache doctor` finds problems in the set-up of this machine.

`kcache integrations` shows which installed frameworks can get their kernels from kcache.
"""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, NamedTuple

import click

from kcache.cli.options import cache_options, flag, json_option, load_settings
from kcache.cli.terminal import columns, show
from kcache.config import Config
from kcache.doctor import OK, PROBLEM, WARNING, Finding, diagnose_libraries
from kcache.dropin import libraries
from kcache.dropin import run_environment as env
from kcache.util.units import counted, plain

if TYPE_CHECKING:
    from rich.table import Table

_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


@click.command(short_help="Find problems in the set-up of this machine.")
@cache_options("array")
@click.option(
    "--program",
    metavar="FILE",
    help="Check only whether `kcache run` has an effect on the program FILE, and if not, show why.",
)
@flag("--remotes", help="Check only the remotes that KCACHE_REMOTE names.")
def doctor(*, directory: str | None, program: str | None, remotes: bool) -> None:
    """Check everything that the cache depends on, and name a remedy for each problem.

    The command checks the settings, the directory, the disk, the backend, a sample of the entries,
    NVRTC, the driver, whether `kcache run` has an effect on programs, and each layer and each
    remote that KCACHE_REMOTE names. It changes nothing on this machine, but it stores a small entry
    in each remote that can be written to. It exits with 1 if it finds a problem, such as a remote
    that does not answer. A warning is not a problem, because the cache works in spite of it.
    """
    findings = list(diagnose_libraries())
    if not any(finding.level == PROBLEM for finding in findings):
        # If a library is missing, these modules can't be imported.
        from kcache.doctor import local_checks, remote_checks  # noqa: PLC0415

        if program is not None:
            findings = list(local_checks.diagnose_program(program))
        elif remotes:
            warnings: list[str] = []
            config, _ = load_settings(directory, complain=warnings.append)
            findings = [Finding(PROBLEM, "settings", sentence) for sentence in warnings]
            findings += remote_checks.diagnose_remotes(config)
            findings = findings or [Finding(OK, "remote", "KCACHE_REMOTE names no remote")]
        else:
            findings += [*local_checks.diagnose(directory), *local_checks.diagnose_run()]
            config = Config.load({"directory": directory}, complain=lambda _: None)
            findings += remote_checks.diagnose(config)
    levels = [finding.level for finding in findings]
    problems, others = levels.count(PROBLEM), levels.count(WARNING)
    show(lambda: _table(findings), [finding._asdict() for finding in findings])
    show(f"\n{counted(problems, 'problem')}, {counted(others, 'warning')}")
    raise click.exceptions.Exit(int(bool(problems)))


def _table(findings: list[Finding]) -> Table:
    """Return a table of the findings, with the remedy of each below it."""
    from rich.table import Table  # noqa: PLC0415  as in `terminal`
    from rich.text import Text  # noqa: PLC0415

    table = Table.grid(padding=(0, 2, 0, 0))
    for least in (7, 15, 20):
        table.add_column(min_width=least, overflow="fold")
    for finding in findings:
        what = Text(plain(finding.what))
        table.add_row(Text(finding.level, _COLOURS[finding.level]), finding.topic, what)
        if finding.do:
            table.add_row("", "", Text(f"-> {plain(finding.do)}"))
    return table


# -- integrations ----------------------------------------------------------------------------------

_RUN = "kcache run -- COMMAND"
_TRITON = "TRITON_CACHE_MANAGER=kcache.integrations.triton:CacheManager"
_BY_RUN, _BY_ADAPTER, _NOT = "kcache run", "an adapter", "not supported"
_BY_BOTH = f"{_BY_RUN}, {_BY_ADAPTER}"


class Framework(NamedTuple):
    """A framework that compiles kernels at run time, and how it gets kernels from kcache.

    Attributes:
        framework: name of the framework.
        installed: the version that is installed here.
        tested_with: the versions that kcache's tests ran with; empty if there are no such tests.
        covered_by: how it gets kernels: by `kcache run`, by an adapter, by both, or not at all.
        line: what to type to enable this, or why the framework is not supported.
    """

    framework: str
    installed: str
    tested_with: str
    covered_by: str
    line: str


#: For each framework, its name, the distributions that may contain it, and the last three fields of
#: `Framework`.
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
    ("torch", ("torch",), "2.11, 2.14", _BY_BOTH, f"{_TRITON} {_RUN}"),
    ("cuda.compute", ("cuda-cccl",), "", _BY_RUN, _RUN),
    ("nvmath-python", ("nvmath-python",), "", _BY_RUN, _RUN),
    ("Transformer Engine", ("transformer-engine",), "", _BY_RUN, _RUN),
    ("TileLang", ("tilelang",), "0.1.15", _BY_RUN, _RUN),
    ("TVM", ("apache-tvm",), "0.27", _BY_RUN, f"TVM_CUDA_COMPILE_MODE=nvrtc {_RUN}"),
    ("tvm-ffi", ("apache-tvm-ffi",), "0.1.15", _BY_RUN, _RUN),
    ("DeepGEMM", ("sgl-deep-gemm", "deep-gemm"), "0.2.5", _BY_RUN, _RUN),
    ("SGLang", ("sglang",), "0.5.23", _BY_RUN, _RUN),
    ("cuDF", ("cudf-cu13", "cudf-cu12"), "", _BY_RUN, _RUN),
    ("FlashInfer", ("flashinfer-python",), "0.7.2", _BY_RUN, _RUN),
    ("Warp", ("warp-lang",), "1.19", _NOT, "NVRTC is linked into it statically"),
    ("JAX", ("jax",), "", _NOT, "its cache is a private interface"),
)


def installed() -> list[Framework]:
    """Return the frameworks that are installed here, in the order of `_FRAMEWORKS`."""
    found: list[Framework] = []
    problem = libraries.problem(env.current())
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
def integrations() -> None:
    """Show the installed frameworks that compile kernels at run time, and how kcache supports them.

    `kcache run` answers the NVRTC and nvcc calls of a program without a change to the program. An
    adapter is a class of kcache that implements the framework's own cache interface. The column HOW
    shows what to type, or why the framework is not supported. A version other than the tested ones
    works if its interface is the same.
    """
    found = installed()
    heads = ("FRAMEWORK", "INSTALLED", "TESTED WITH", "CACHED BY", "HOW")
    rows = [heads, *(tuple(field or "-" for field in each) for each in found)]
    nothing = "no framework that compiles kernels at run time is installed here"
    show(lambda: columns(rows) if found else nothing, [each._asdict() for each in found])
