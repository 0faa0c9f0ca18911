"""Fixtures: nvcc from wheels, and a daemon that answers starts of nvcc."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kcache.daemons import sockets, spawn
from kcache.dropin import build
from kcache.dropin import run_environment as env

if sys.platform != "linux":
    pytest.skip("the drop-in needs Linux", allow_module_level=True)

#: Matches names with a process id, a time or a random number, which differ between two runs of nvcc
#: without a cache.
_MADE_UP = re.compile(
    rb"tmpxft_[0-9a-f]{8}_[0-9a-f]{8}|_[0-9a-f]{8}(?=_\d+_\w+_cu_)|_cu_[0-9a-f]{8}_\d+|(?<=_cu_)[0-9a-f]{8}"
)

SOURCE = """\
#include "header.h"
#include <cstdio>
template <int N> __device__ int times(int x) { return x * N; }
extern "C" __global__ void kernel(int* p) { p[threadIdx.x] = times<FACTOR>(p[threadIdx.x]); }
void launch(int* p) { kernel<<<1, 32>>>(p); }
"""


@pytest.fixture(scope="session")
def wheels() -> Path:
    """The folder of a CUDA toolkit from wheels. The test is skipped if there is none."""
    for folder in map(Path, sys.path):
        if (folder / "nvidia/cu13/bin/nvcc").is_file():
            return folder / "nvidia/cu13"
    pytest.skip("nvcc is missing: install the dependency group nvcc")


def toolkit(wheels: Path, folder: Path) -> Path:
    """Make a CUDA toolkit with the usual layout. Its files are links; tests may only replace them."""
    for name in ("bin", "lib", "nvvm/bin"):
        (folder / name).mkdir(parents=True)
        for path in (wheels / name).iterdir():
            (folder / name / path.name).symlink_to(path)
    for name in ("include", "nvvm/libdevice"):
        (folder / name).symlink_to(wheels / name)
    (folder / "lib64").symlink_to("lib")
    (folder / "lib/libcudart.so").symlink_to("libcudart.so.13")
    return folder


@pytest.fixture(scope="session")
def home(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toolkit that no test changes."""
    return toolkit(wheels, tmp_path_factory.mktemp("nvcc") / "cuda")


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the native libraries and programs, built from their sources."""
    if build.compiler() is None:
        pytest.skip("no C compiler is installed")
    folder = tmp_path_factory.mktemp("native") / "libraries"
    build.build(str(folder), flags=("-Werror",))
    return folder


class Service:
    """A daemon with a cache of its own, and clients that connect to it."""

    def __init__(self, folder: Path, libraries: Path, nvcc: Path) -> None:
        self.nvcc = nvcc
        self.client = libraries / os.uname().machine / build.CLIENT
        self.environment = {
            "PATH": f"{nvcc.parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "LANG": "C",
            "KCACHE_DIR": str(folder / "cache"),
            env.LIBRARIES: str(libraries),
        }
        self.restart()

    def restart(self, **variables: str) -> None:
        told = {**self.environment, **variables}
        self.socket = spawn.spawn_own(env.service(told), told, logs=False)

    @property
    def counts(self) -> dict[str, int]:
        about = sockets.status(self.socket)
        assert about is not None
        return about["counts"]

    def run(
        self, *arguments: object, program: Path | None = None, **more: Any
    ) -> subprocess.CompletedProcess[bytes]:
        """Run nvcc through the client, which connects to the daemon."""
        more = {env.SOCKET: self.socket, **more}
        return self.start(self.client, program or self.nvcc, *arguments, **more)

    def alone(
        self, *arguments: object, program: Path | None = None, **more: Any
    ) -> subprocess.CompletedProcess[bytes]:
        """Run nvcc itself, without kcache."""
        return self.start(program or self.nvcc, *arguments, **more)

    def kcache(self, *arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run the command `kcache`."""
        return self.start(sys.executable, "-m", "kcache", *arguments, text=True, **more)

    def start(
        self, *command: object, cwd: Path | None = None, text: bool = False, **variables: str | None
    ) -> subprocess.CompletedProcess[Any]:
        """Run a program, and wait for its end. A variable with the value None is removed."""
        changed = {**self.environment, **variables}
        environment = {name: value for name, value in changed.items() if value is not None}
        words = [*map(str, command)]
        return subprocess.run(
            words, cwd=cwd, env=environment, capture_output=True, text=text, check=False
        )

    def begin(self, *arguments: str, cwd: Path, **how: Any) -> subprocess.Popen[bytes]:
        """Start nvcc through the client, and return without waiting for its end."""
        environment = {**self.environment, env.SOCKET: self.socket}
        command = [self.client, self.nvcc, *arguments]
        return subprocess.Popen(command, cwd=cwd, env=environment, **how)


@pytest.fixture
def service(tmp_path: Path, libraries: Path, home: Path) -> Iterator[Service]:
    made = Service(tmp_path, libraries, home / "bin/nvcc")
    yield made
    sockets.ask(made.socket, sockets.STOP)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a source and its header."""
    return write_project(tmp_path / "project")


def write_project(folder: Path) -> Path:
    (folder / "include").mkdir(parents=True)
    (folder / "include/header.h").write_text("#define FACTOR 3\n")
    (folder / "k.cu").write_text(SOURCE)
    (folder / "other.cu").write_text(SOURCE.replace("kernel", "other").replace("launch", "start"))
    (folder / "options.txt").write_text("-lineinfo -DMORE=1\n")
    return folder


def written(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return a mapping from the path of each file below `folder` to its mode and content."""
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_mode, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def comparable(content: bytes) -> bytes:
    """Return the content of a file without the parts that differ between two runs of nvcc."""
    return _MADE_UP.sub(b"?", content)
