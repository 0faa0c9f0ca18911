"""`kcache demo`: compiles a real kernel in one process, and hits it in the next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import click

from kcache.cli.demo_process import NAMES, Job, Measurement
from kcache.cli.open_cache import json_option
from kcache.cli.terminal import STDOUT, naming, show, spinner
from kcache.errors import ConfigError, KcacheError
from kcache.nvrtc.options import parse_arch
from kcache.util.distribution import how_to_install
from kcache.util.units import format_size, format_time

__all__ = ["demo", "find_cccl"]

#: The target if there is no GPU.
_ARCH = "sm_90"
#: Where the wheels put the CCCL headers, below a site-packages directory.
_CCCL = ("nvidia/cu13/include/cccl", "nvidia/cuda_cccl/include", "nvidia/cu12/include/cccl")
_PROBE = "cub/block/block_merge_sort.cuh"


class Run(NamedTuple):
    """One process: what it measured, and its time from start to end, in seconds."""

    measured: Measurement
    whole: float


@click.command(short_help="Compile a real CUB kernel, then get it from the cache.")
@click.option(
    "--arch", metavar="ARCH", help=f"Target, such as sm_90.  [default: this GPU's, else {_ARCH}]"
)
@click.option(
    "--directory",
    type=click.Path(),
    metavar="DIR",
    help="Put the cache into DIR.  [default: a temporary directory]",
)
@json_option("object")
def demo(*, arch: str | None, directory: str | None, as_json: bool) -> None:
    """Compile a real CUB kernel in one process, then get it from the cache in a new process.

    No GPU is needed. The demo measures all times on this machine.
    """
    include = find_cccl()
    if include is None:
        raise ConfigError(
            "the demo compiles a CUB kernel, and the CUB headers are not installed: "
            + how_to_install("demo")
        )
    target, where = _target(arch)
    if not as_json:
        show(f"CUB block merge sort, {len(NAMES)} instances, for {target}{where}\n")
    with tempfile.TemporaryDirectory(prefix="kcache-demo-") as temporary:
        job = Job(os.path.abspath(directory or temporary), target, include, recache=True)
        first = _run(job, "process 1 compiles")
        second = _run(job._replace(recache=False), "process 2 asks the cache")
    if not second.measured.cached or second.measured.digest != first.measured.digest:
        raise KcacheError("the second process did not get the kernel of the first from the cache")
    if as_json:
        show(json.dumps(_as_json(target, first, second), indent=2))
        return
    _show(first, second)
    if directory is not None:
        show(f"\nThe cache is in {directory}.")
    show("\nYour own kernel, twice:  kcache compile FILE.cu --arch " + target)


def find_cccl() -> str | None:
    """Return the include directory of the CCCL headers (CUB, Thrust, libcu++), or None."""
    for entry in sys.path:
        for folder in _CCCL:
            path = os.path.join(entry, folder)
            if os.path.isfile(os.path.join(path, _PROBE)):
                return os.path.abspath(path)
    return None


def _target(arch: str | None) -> tuple[str, str]:
    """Return the target, and in words how it relates to this machine."""
    from kcache.nvrtc.device import current_arch

    if arch is not None:
        return str(parse_arch(arch)), ""
    try:
        return current_arch(), " (this GPU)"
    except ConfigError:
        return _ARCH, " (no GPU here)"


def _run(job: Job, title: str) -> Run:
    """Do the job in a new process.

    Raises:
        ConfigError: it can't be done with this set-up; KcacheError: it failed.
    """
    # -P: the working directory may hold another kcache, such as a clone of the repository.
    command = [
        sys.executable,
        "-P",
        "-m",
        "kcache.cli.demo_process",
        json.dumps(job._asdict()),
    ]
    with spinner(title):
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        whole = time.perf_counter() - started
    if done.returncode != 0:
        failure = ConfigError if done.returncode == 2 else KcacheError
        raise failure(done.stderr.strip() or f"a process ended with {done.returncode}")
    return Run(Measurement(**json.loads(done.stdout)), whole)


def _show(first: Run, second: Run) -> None:
    from rich.console import Console
    from rich.text import Text

    cold, hot = first.measured, second.measured
    rows = [
        ("", "process 1", "process 2", ""),
        ("", "compiles", "hits", "faster"),
        _times("kernel", cold.compile_seconds, hot.get_seconds),
        _times("... once more", cold.compile_seconds, hot.again_seconds),
        _times("whole process", first.whole, second.whole),
        ("headers", f"{cold.headers} read", f"{hot.headers} verified", ""),
        ("compiler", _loaded(cold), _loaded(hot), ""),
        ("CUBIN", format_size(cold.cubin), "same bytes", ""),
        ("PTX", format_size(cold.ptx), "same bytes", ""),
    ]
    lines: list[Text] = []
    for number, (name, before, after, ratio) in enumerate(rows):
        line = Text(style="bold" if number < 2 else "")
        line.append(f"{name:<14}{before:>12}")
        line.append(f"{after:>15}", style="green")
        line.append(f"{ratio:>14}", style="bold")
        line.rstrip()
        lines.append(line)
    with naming(STDOUT):
        Console(highlight=False, soft_wrap=True).print(*lines, sep="\n")


def _as_json(target: str, *runs: Run) -> dict[str, object]:
    processes = [{**run.measured._asdict(), "process_seconds": run.whole} for run in runs]
    return {"arch": target, "names": list(NAMES), "processes": processes}


def _times(name: str, slow: float, fast: float) -> tuple[str, str, str, str]:
    return name, format_time(slow), format_time(fast), f"{slow / fast:,.0f} times"


def _loaded(measured: Measurement) -> str:
    return "loaded" if measured.compiler_loaded else "not loaded"
