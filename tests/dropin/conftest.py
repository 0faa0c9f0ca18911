"""Fixtures: programs under `kcache run`, and interface libraries that are built once."""

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from core.helpers import run

from kcache.dropin import build

CLIENTS = Path(__file__).parent / "clients"
KCACHE = (sys.executable, "-m", "kcache")
_COUNTS = re.compile(r"^kcache: hits (\d+); misses (\d+); .*$", re.MULTILINE)

if sys.platform != "linux":
    pytest.skip("the drop-in needs Linux", allow_module_level=True)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interface libraries of the wheel, or libraries that are built here if it has none."""
    folder = tmp_path_factory.mktemp("dropin") / "libraries"
    if (packaged := Path(build.__file__).with_name("lib")).is_dir():
        shutil.copytree(packaged, folder)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)  # others may be able to write to the installed wheel
        return folder
    if build.compiler() is None:
        pytest.skip("no C compiler is installed")
    build.build(str(folder), flags=("-Werror",))
    return folder


def compile_linked(real: Path, name: str, program: Path, *flags: str) -> Path:
    """Compile the client `name`, which is written in C, and link it with the NVRTC at `real`."""
    compiler, headers = build.compiler(), real.parent.parent / "include"
    if compiler is None or not (headers / "nvrtc.h").exists():
        pytest.skip("the C compiler or nvrtc.h is not installed")
    command = [compiler, CLIENTS / name, "-o", program, f"-I{headers}", real]
    subprocess.run([*command, f"-Wl,-rpath,{real.parent}", *flags], check=True)
    return program


@pytest.fixture(scope="session")
def linked(real: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that is linked with NVRTC. Its argument is an include directory."""
    return compile_linked(real, "linked.c", tmp_path_factory.mktemp("linked") / "linked")


def is_there(module: str) -> bool:
    """Return whether a module is installed. If it is missing and `TEST_CLIENTS` is set, fail."""
    with suppress(ModuleNotFoundError):
        if importlib.util.find_spec(module) is not None:
            return True
    if os.environ.get("TEST_CLIENTS"):
        pytest.fail(f"{module} is not installed")
    return False


def needs(module: str) -> None:
    """Skip a test if a module that it needs is not installed."""
    if not is_there(module):
        pytest.skip(f"{module} is not installed")


class Told:
    """The exit code and output of a program, and the counts that `--stats` printed about it."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code, self.output, self.errors = done.returncode, done.stdout, done.stderr
        found = _COUNTS.search(done.stderr)
        self.line = found[0] if found else ""
        self.hits, self.misses = (int(found[1]), int(found[2])) if found else (-1, -1)


class Dropin:
    """Runs programs with and without the drop-in, in the same environment."""

    def __init__(self, libraries: Path, folder: Path, runtime: Path) -> None:
        self.folder = folder
        self.libraries = str(libraries)
        self.runtime = runtime
        self.environment = {
            **os.environ,
            "KCACHE_DROPIN_LIBRARIES": self.libraries,
            "KCACHE_DIR": str(folder / "cache"),
            "XDG_RUNTIME_DIR": str(self.runtime),
        }

    def bare(self, *command: object, **more: str) -> Told:
        return self._run(list(map(str, command)), more)

    def same(self, *command: object, stats: bool = True, **more: str) -> Told:
        """Run a program with the drop-in; assert the same exit code and output as without it."""
        bare, told = self.bare(*command, **more), self.run(*command, stats=stats, **more)
        assert (told.code, told.output) == (bare.code, bare.output), told.errors + bare.errors
        return told

    def run(self, *command: object, stats: bool = True, **more: str) -> Told:
        flags = ["--stats"] if stats else []
        return self._run([*KCACHE, "run", *flags, "--", *map(str, command)], more)

    def starts(self, *command: object, **how: Any) -> subprocess.Popen[str]:
        """Start a program with pipes as its standard input and output."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(
            list(map(str, command)), env=self.environment, cwd=self.folder, **pipes, **how
        )

    def _run(self, command: list[str], more: dict[str, str]) -> Told:
        return Told(run(*command, environ={**self.environment, **more}, cwd=self.folder))


class Fake:
    """A server that calls the function `do` with each connection, in a thread of its own."""

    def __init__(
        self, folder: Path, do: Callable[[socket.socket], object], user: int | None = None
    ) -> None:
        self.path = str(folder / "fake")
        self.connections = 0
        self._do = do
        self._listener = socket.socket(socket.AF_UNIX)
        self._open = [self._listener]
        self._listener.bind(self.path)
        own = os.geteuid()
        os.seteuid(own if user is None else user)  # a client sees the user who calls `listen`
        self._listener.listen(64)
        os.seteuid(own)
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                self._open.append(self._listener.accept()[0])
                self._threads.append(threading.Thread(target=self._attend, args=self._open[-1:]))
                self._threads[-1].start()

    def _attend(self, connection: socket.socket) -> None:
        with suppress(OSError):
            self.connections += bool(connection.recv(1, socket.MSG_PEEK))
            self._do(connection)

    def close(self) -> None:
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
        for each in self._open:
            each.close()


@pytest.fixture
def dropin(libraries: Path, tmp_path: Path) -> Iterator[Dropin]:
    folder = tmp_path / "dropin"
    folder.mkdir()
    # The path of a socket has at most 107 bytes, and pytest's directories have long names.
    with tempfile.TemporaryDirectory(prefix="kd-", dir="/tmp") as runtime:
        yield Dropin(libraries, folder, Path(runtime))


@pytest.fixture
def include(tmp_path: Path) -> Path:
    """A directory with the header that the clients include."""
    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "scale.h").write_text("#define SCALE 2\n")
    return folder


@pytest.fixture(scope="session")
def real(nvrtc: tuple[int, int]) -> Path:
    """The real NVRTC that is installed here."""
    from kcache.nvrtc import library

    found = library.find()
    return Path(found.path)
