"""A process that has none of Linux's own calls, as on macOS, compiles, hits and has its commands."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

#: The standard library picks its own parts by the platform, so those are imported first.
_WITHOUT = """
import os, platform, signal, socket, subprocess, sys, tempfile, urllib.request
for module, names in (
    (os, "sched_getaffinity memfd_create MFD_CLOEXEC eventfd EFD_NONBLOCK EFD_CLOEXEC "
         "eventfd_write pidfd_open posix_fadvise posix_fallocate getxattr"),
    (socket, "SO_PEERCRED"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "darwin"
"""

_COMPILES = """
import kcache
options = kcache.CompileOptions(arch="sm_80")
for _ in range(2):
    with kcache.KernelCache(sys.argv[1], backend="file") as cache:
        cache.get_or_compile('extern "C" __global__ void f(float *p) { *p = 1; }', options=options)
        stats = cache.stats()
        print(stats.hits, stats.misses)
"""


def _run(program: str, folder: os.PathLike[str], *arguments: str) -> str:
    found = subprocess.run(
        [sys.executable, "-c", _WITHOUT + program, *arguments],
        env={**os.environ, "KCACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "Traceback" not in found.stderr
    return found.stdout


def test_a_kernel_compiles_and_hits(tmp_path):
    pytest.importorskip("cuda.bindings.nvrtc")
    found = _run(_COMPILES, tmp_path, str(tmp_path / "cache"))
    assert found.splitlines() == ["0 1", "1 0"]


@pytest.mark.parametrize("command", ["doctor", "info", "ls", "verify"])
def test_a_command_does_not_fail(command, tmp_path):
    pytest.importorskip("click")
    _run("from kcache.cli import main\nsys.exit(main())", tmp_path / "cache", command)
