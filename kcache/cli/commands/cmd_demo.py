"""`kcache demo`: compiles a real kernel in one process, and gets it from the cache in the next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from kcache import environment
from kcache.cli.options import json_option
from kcache.cli.terminal import columns, progress, show
from kcache.errors import ConfigError, KcacheError
from kcache.nvrtc.cuda_headers import folder_of
from kcache.nvrtc.options import parse_arch
from kcache.util.child_process import without_dropin
from kcache.util.cuda_driver import current_arch
from kcache.util.hints import how_to_install
from kcache.util.units import format_size, format_time

_SOURCE = Path(__file__).with_name("demo.cu")
_TYPES = ("int", "unsigned", "long long", "unsigned long long", "float", "double", "char", "short")
_TILES = ("128, 8", "128, 16", "256, 8", "256, 16")
#: The name expressions of the demo's kernel, like those of a library that sorts several types.
_NAMES = tuple(f"sort_tiles<{key}, {tile}>" for key in _TYPES for tile in _TILES)
#: The target if there is no GPU.
_ARCH = "sm_90"
#: A header that the demo's source includes.
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
def demo(*, arch: str | None, directory: str | None) -> None:
    """Compile a real CUB kernel in one process, then get it from the cache in a new process.

    No GPU is needed. All times that the command prints are measured on this machine.
    """
    include = folder_of(_PROBE)
    if include is None:
        raise ConfigError(f"the headers of CUB are not installed: {how_to_install('demo')}")
    target, where = _target(arch)
    show(f"CUB block merge sort, {len(_NAMES)} instances, for {target}{where}\n")
    with tempfile.TemporaryDirectory(prefix="kcache-demo-") as temporary:
        job = ["--directory", os.path.abspath(directory or temporary), "--arch", target]
        job += ["--std", "c++17", "-I", include, *(f"--name={name}" for name in _NAMES)]
        outputs = [os.path.join(temporary, name) for name in ("first", "second")]
        first = _compile([*job, "-o", outputs[0], "--recache"], "process 1 compiles")
        second = _compile([*job, "-o", outputs[1]], "process 2 asks the cache")
        is_same = len({Path(output).read_bytes() for output in outputs}) == 1
    if not (second["cached"] and is_same):
        raise KcacheError("process 2 did not get the kernel of process 1 from the cache")
    record = {"arch": target, "names": list(_NAMES), "processes": [first, second]}
    show(lambda: _table(first, second), record)
    if directory is not None:
        show(f"\nThe cache is in {directory}.")
    show(f"\nTo try your own kernel, run this twice:  kcache compile FILE.cu --arch {target}")


def _target(arch: str | None) -> tuple[str, str]:
    """Return the target, and a remark that says whether it is the target of this machine's GPU."""
    if arch is not None:
        return parse_arch(arch), ""
    try:
        return current_arch(), " (this GPU)"
    except ConfigError:
        return _ARCH, " (no GPU here)"


def _compile(job: list[str], title: str) -> dict[str, Any]:
    """Run `kcache compile` with the demo's source in a new process.

    Returns the JSON output of the command, and the time that the process took as
    `process_seconds`.

    Args:
        job: further arguments of the command.
        title: what is being done, for the progress line.

    Raises:
        ConfigError: the process failed.
    """
    # -P: the working directory may contain another kcache, such as a clone of the repository.
    command = [sys.executable, "-P", "-m", "kcache", "compile", str(_SOURCE), "--json", *job]
    # The user's settings for programs do not apply to the demo. If there is a driver, NVRTC 12.9
    # and later would answer from a cache of its own.
    variables = without_dropin(environment.variables())
    variables = {name: variables[name] for name in variables if not name.startswith("KCACHE_")}
    variables["CUDA_CACHE_DISABLE"] = "1"
    with progress(title):
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
        whole = time.perf_counter() - started
    if done.returncode != 0:
        (about,) = json.loads(done.stdout or "[{}]")
        reason = about.get("error") or done.stderr.strip().removeprefix("kcache: error: ")
        raise ConfigError(reason or f"kcache compile exited with status {done.returncode}")
    return {**json.loads(done.stdout)[0], "process_seconds": whole}


def _table(cold: dict[str, Any], hot: dict[str, Any]) -> str:
    rows = [("", "process 1", "process 2", ""), ("", "compiles", "hits", "faster")]
    for name, before, after in (
        ("kernel", cold["compile_seconds"], hot["seconds"]),
        ("whole process", cold["process_seconds"], hot["process_seconds"]),
    ):
        shown = format_time(before), format_time(after)
        rows.append((name, *shown, f"{before / after:,.0f} times"))
    rows += [
        ("headers", f"{cold['headers']} read", f"{hot['headers']} verified", ""),
        (cold["emit"].upper(), format_size(cold["size_bytes"]), "same bytes", ""),
    ]
    return columns(rows)
