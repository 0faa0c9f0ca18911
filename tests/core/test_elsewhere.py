"""What runs where the calls of POSIX are not there, in a process that takes itself for Windows."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from core.helpers import output_of, python

SIMULATED = Path(__file__).with_name("without_posix.py")

_ENGINES = """
import os
import sys
import kcache

payloads = [os.urandom(5000) for _ in range(60)]
for backend in ("file", "zstd"):
    with kcache.open_engine(f"{sys.argv[1]}/{backend}", backend=backend, max_size=200_000) as engine:
        keys = [f"{n:064x}" for n in range(60)]
        for number, key in enumerate(keys):
            assert engine.put(key, kcache.Entry({"x": payloads[number]}, {}))
        assert engine.get(keys[-1]).payload["x"] == payloads[59]
        assert engine.size_bytes <= 200_000
        assert engine.delete(keys[-1])
        assert engine.get_or_create(keys[0], lambda: kcache.Entry({"x": b"1"}, {})) is not None
        assert list(engine.backend.check()) == []
        assert engine.stats().errors == engine.stats().corrupt == 0
        assert engine.stats().evictions > 0
    assert engine.total_stats().puts >= 60
"""
_KERNELS = """
import sys
import kcache

options = kcache.CompileOptions(arch="sm_90")
for name in ("1", "2"):
    with kcache.KernelCache(sys.argv[1]) as cache:
        kernel = cache.get_or_compile("__global__ void k() {}", "k", options)
        assert kernel.cubin
        cache.print_info()
"""


@functools.cache
def _as_user_0() -> list[str]:
    """Return a command's beginning that makes its user 0: Windows says 0 of each file's owner."""
    if os.geteuid() == 0:
        return []
    try:
        subprocess.run(["unshare", "-r", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("neither root, nor are there user namespaces")
    return ["unshare", "-r"]


def run(tmp_path: Path, code: str, *arguments: str, fails: bool = False, **variables: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [*_as_user_0(), sys.executable, "-P", SIMULATED, script, *arguments],
        env=variables | {"KCACHE_DIR": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert fails or done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout
    return done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="that is the real thing")
def test_engines(tmp_path: Path) -> None:
    run(tmp_path, _ENGINES, str(tmp_path / "engines"))


@pytest.mark.usefixtures("nvrtc")
def test_kernels_are_compiled_and_not_cached(tmp_path: Path) -> None:
    """Compilers of other systems can't be recorded, so nothing is known of what they read."""
    said = run(tmp_path, _KERNELS, str(tmp_path / "cache"), KCACHE_WORKERS="0")
    assert "entries               0" in said


COMMAND = "import sys\nfrom kcache.cli import main\nsys.exit(main())"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("info", "0 kernels, 0 manifests"),
        ("verify", "0 entries read"),
        ("doctor", "the drop-in needs Linux"),
    ],
)
def test_commands(command: str, says: str, tmp_path: Path) -> None:
    said = run(tmp_path, COMMAND, *command.split())
    assert says in said


@pytest.mark.parametrize("command", ["run true", "server start"])
def test_commands_of_the_drop_in_say_that_they_need_linux(command: str, tmp_path: Path) -> None:
    said = run(tmp_path, COMMAND, *command.split(), fails=True)
    assert "needs Linux" in said


# -- macOS ---------------------------------------------------------------------------------------

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

_HITS = """
import kcache
options = kcache.CompileOptions(arch="sm_80")
for _ in range(2):
    with kcache.KernelCache(backend="file") as cache:
        cache.get_or_compile('extern "C" __global__ void f(float *p) { *p = 1; }', options=options)
        stats = cache.stats()
        print(stats.hits, stats.misses)
"""


def run_without_linux(program: str, folder: Path) -> str:
    done = python(_WITHOUT + program, environ={"KCACHE_DIR": str(folder)})
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.usefixtures("nvrtc")
def test_without_the_calls_of_linux_kernels_and_commands_work(tmp_path: Path) -> None:
    assert run_without_linux(_HITS, tmp_path / "cache").splitlines() == ["0 1", "1 0"]
    for command in ("doctor", "ls"):
        main = f"sys.argv = ['kcache', {command!r}]\nfrom kcache.cli import main\nsys.exit(main())"
        run_without_linux(main, tmp_path / "cache")


def test_kcache_runs_where_assertions_are_off() -> None:
    output_of("import kcache", environ={"PYTHONOPTIMIZE": "2"})
