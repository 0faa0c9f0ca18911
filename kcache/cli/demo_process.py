"""Demo process: gets the demo's kernel once, and says how that went.

Run as `python -m kcache.cli.demo_process DIRECTORY ARCH INCLUDE [recache]`: the directory of the
cache, the target, the directory of the CCCL headers, and whether to compile in any case. Writes
what `measure` returns to standard output, as JSON.
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

from kcache import CompileOptions, KernelCache
from kcache.errors import KcacheError
from kcache.nvrtc import library

_TYPES = ("int", "unsigned", "long long", "unsigned long long", "float", "double", "char", "short")
_TILES = ("128, 8", "128, 16", "256, 8", "256, 16")
#: The instances of the demo's kernel. A library that sorts tiles of several types has similar ones.
NAMES = tuple(f"sort_tiles<{key}, {tile}>" for key in _TYPES for tile in _TILES)


def main() -> int:
    """Do what `sys.argv` says; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the demo itself says everything
    # NVRTC 12.9 and later has a cache of its own if there is a driver. Our demo does not use it.
    os.putenv("CUDA_CACHE_DISABLE", "1")
    directory, arch, include, *more = sys.argv[1:]
    try:
        measured = measure(directory, arch, include, recache=more == ["recache"])
    except KcacheError as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return 2
    sys.stdout.write(json.dumps(measured))
    return 0


def measure(directory: str, arch: str, include: str, *, recache: bool) -> dict[str, object]:
    """Get the kernel, and return how that went.

    `get_seconds` is what `get_or_compile` took, and `again_seconds` what it took once more after a
    hit, headers checked once more. `compiler_loaded` says whether this process has imported a CUDA
    package or loaded NVRTC. `digest` is that of the outputs.

    Raises:
        KcacheError: whatever `get_or_compile` raises.
    """
    for name in ("files", "manifest", "request"):  # imports are not a part of the hit
        importlib.import_module(f"kcache.nvrtc.{name}")
    source = Path(__file__).with_name("demo.cu").read_text(encoding="utf-8")
    options = CompileOptions(arch=arch, std="c++17", include_paths=[include])
    with KernelCache(
        directory,
        backend="file",
        read_only=False,
        disable=False,
        recache=recache,
        header_check="always",
        on_miss="compile",
    ) as cache:
        started = time.perf_counter()
        kernel = cache.get_or_compile(source, NAMES, options, source_name="demo.cu")
        got = again = time.perf_counter()
        if kernel.cached:
            cache.get_or_compile(source, NAMES, options, source_name="demo.cu")
            again = time.perf_counter()
    ptx, cubin = kernel.ptx or b"", kernel.cubin or b""
    return {
        "cached": kernel.cached,
        "get_seconds": got - started,
        "again_seconds": again - got,
        "compile_seconds": kernel.compile_seconds,
        "headers": len(kernel.dependencies),
        "compiler_loaded": "cuda.bindings" in sys.modules or library.loaded() is not None,
        "cubin_bytes": len(cubin),
        "ptx_bytes": len(ptx),
        "digest": hashlib.sha256(cubin + ptx, usedforsecurity=False).hexdigest(),
    }


if __name__ == "__main__":
    sys.exit(main())
