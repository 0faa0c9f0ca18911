"""`kcache demo`: compiles a real kernel in one process, and hits it in the next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import click

from kcache.cli.demo_process import NAMES
from kcache.cli.options import json_option
from kcache.cli.terminal import columns, progress, show
from kcache.errors import ConfigError, KcacheError
from kcache.nvrtc.cuda_headers import folder_of
from kcache.nvrtc.options import parse_arch
from kcache.util.distribution import how_to_install
from kcache.util.units import format_size, format_time

#: The target if there is no GPU.
_ARCH = "sm_90"
#: A header that the demo compiles with.
_PROBE = "cub/block/block_merge_sort.cuh"


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
    include = folder_of(_PROBE)
    if include is None:
        raise ConfigError(
            "the demo compiles a CUB kernel, and the CUB headers are not installed: "
            + how_to_install("demo")
        )
    target, where = _target(arch)
    if not as_json:
        show(f"CUB block merge sort, {len(NAMES)} instances, for {target}{where}\n")
    with tempfile.TemporaryDirectory(prefix="kcache-demo-") as temporary:
        job = [os.path.abspath(directory or temporary), target, include]
        first = _run([*job, "recache"], "process 1 compiles")
        second = _run(job, "process 2 asks the cache")
    if not second["cached"] or second["digest"] != first["digest"]:
        raise KcacheError("the second process did not get the kernel of the first from the cache")
    if as_json:
        show({"arch": target, "names": list(NAMES), "processes": [first, second]})
        return
    show(_table(first, second))
    if directory is not None:
        show(f"\nThe cache is in {directory}.")
    show("\nYour own kernel, twice:  kcache compile FILE.cu --arch " + target)


def _target(arch: str | None) -> tuple[str, str]:
    """Return the target, and in words how it relates to this machine."""
    from kcache.util.cuda_driver import current_arch

    if arch is not None:
        return str(parse_arch(arch)), ""
    try:
        return current_arch(), " (this GPU)"
    except ConfigError:
        return _ARCH, " (no GPU here)"


def _run(job: list[str], title: str) -> dict[str, Any]:
    """Do the job in a new process; return what it measured, and its whole time.

    Raises:
        ConfigError: it can't be done with this set-up; KcacheError: it failed.
    """
    # -P: the working directory may hold another kcache, such as a clone of the repository.
    command = [sys.executable, "-P", "-m", "kcache.cli.demo_process", *job]
    with progress(title):
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        whole = time.perf_counter() - started
    if done.returncode != 0:
        failure = ConfigError if done.returncode == 2 else KcacheError
        raise failure(done.stderr.strip() or f"a process ended with {done.returncode}")
    return {**json.loads(done.stdout), "process_seconds": whole}


def _table(cold: dict[str, Any], hot: dict[str, Any]) -> str:
    rows = [("", "process 1", "process 2", ""), ("", "compiles", "hits", "faster")]
    for name, before, after in (
        ("kernel", "compile_seconds", "get_seconds"),
        ("asked again", "compile_seconds", "again_seconds"),
        ("whole process", "process_seconds", "process_seconds"),
    ):
        slow, fast = cold[before], hot[after]
        shown = "" if after == "again_seconds" else format_time(slow)  # only process 2 asks again
        rows.append((name, shown, format_time(fast), f"{slow / fast:,.0f} times"))
    loaded = "loaded" if cold["compiler_loaded"] else "in a worker"
    again = "loaded" if hot["compiler_loaded"] else "not loaded"
    rows += [
        ("headers", f"{cold['headers']} read", f"{hot['headers']} verified", ""),
        ("compiler", loaded, again, ""),
        ("CUBIN", format_size(cold["cubin_bytes"]), "same bytes", ""),
        ("PTX", format_size(cold["ptx_bytes"]), "same bytes", ""),
    ]
    return columns(rows)
