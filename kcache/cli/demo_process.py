"""Demo process: gets the demo's kernel once, and says how that went.

Run as `python -m kcache.cli.demo_process JOB`, with a `Job` as JSON. Writes a
`Measurement` to standard output, as JSON too.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

from kcache import CompiledKernel, CompileOptions, KernelCache
from kcache.errors import KcacheError

__all__ = ["NAMES", "Job", "Measurement", "main"]

_TYPES = ("int", "unsigned", "long long", "unsigned long long", "float", "double", "char", "short")
_TILES = ("128, 8", "128, 16", "256, 8", "256, 16")
#: The instances of the demo's kernel. A library that sorts tiles of several types has similar ones.
NAMES = tuple(f"sort_tiles<{key}, {tile}>" for key in _TYPES for tile in _TILES)


class Job(NamedTuple):
    """What to do.

    Attributes:
        directory: of the cache.
        arch: the target.
        include: directory of the CCCL headers.
        recache: compile even if the kernel is in the cache.
    """

    directory: str
    arch: str
    include: str
    recache: bool


class Measurement(NamedTuple):
    """How it went.

    Attributes:
        cached: whether the kernel came from the cache.
        get_seconds: what `get_or_compile` took.
        again_seconds: what it took when asked once more, headers checked once more.
        compile_seconds: what NVRTC took when it compiled the kernel.
        headers: number of headers that the kernel depends on.
        compiler_loaded: whether this process has imported a CUDA package or loaded NVRTC.
        cubin, ptx: sizes in bytes.
        digest: of both, SHA-256.
    """

    cached: bool
    get_seconds: float
    again_seconds: float
    compile_seconds: float
    headers: int
    compiler_loaded: bool
    cubin: int
    ptx: int
    digest: str


def main() -> int:
    """Do the job in `sys.argv[1]`; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the demo itself says everything
    # NVRTC 12.9 and later has a cache of its own if there is a driver. Our demo does not use it.
    os.putenv("CUDA_CACHE_DISABLE", "1")
    try:
        measurement = measure(Job(**json.loads(sys.argv[1])))
    except KcacheError as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return 2
    sys.stdout.write(json.dumps(measurement._asdict()))
    return 0


def measure(job: Job) -> Measurement:
    """Get the kernel once, and return the measurement.

    Raises:
        KcacheError: whatever `get_or_compile` raises.
    """
    _import_all()
    source = Path(__file__).with_name("demo.cu").read_text(encoding="utf-8")
    options = CompileOptions(arch=job.arch, std="c++17", include_paths=[job.include])
    with KernelCache(
        job.directory,
        backend="file",
        read_only=False,
        disable=False,
        recache=job.recache,
        header_check="always",
    ) as cache:
        started = time.perf_counter()
        kernel = cache.get_or_compile(source, NAMES, options, source_name="demo.cu")
        got = again = time.perf_counter()
        if kernel.cached:
            cache.get_or_compile(source, NAMES, options, source_name="demo.cu")
            again = time.perf_counter()
    return _measurement(kernel, got - started, again - got)


def _import_all() -> None:
    """Import what a hit needs, so that imports are not measured as a part of the hit."""
    for name in ("files", "library", "manifest", "request"):
        importlib.import_module(f"kcache.nvrtc.{name}")


def _measurement(kernel: CompiledKernel, seconds: float, again: float) -> Measurement:
    from kcache.nvrtc import library

    ptx, cubin = kernel.ptx or b"", kernel.cubin or b""
    return Measurement(
        kernel.cached,
        seconds,
        again,
        kernel.compile_seconds,
        len(kernel.dependencies),
        "cuda.bindings" in sys.modules or library.loaded() is not None,
        len(cubin),
        len(ptx),
        hashlib.sha256(cubin + ptx, usedforsecurity=False).hexdigest(),
    )


if __name__ == "__main__":
    sys.exit(main())
