"""The script that CI runs: what it installs, that it goes on without, and what it ends with."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "run"
SERVERS = {"nginx", "redis-server"}
BUILD = {"strace", "musl-gcc", "gcc"}
PROGRAMS = {*BUILD, *SERVERS}

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="it is a script for bash"),
    pytest.mark.skipif(not SCRIPT.is_file(), reason="this is no checkout"),
    pytest.mark.skipif(shutil.which("bash") is None, reason="bash is missing"),
]


class Machine:
    """A machine with few programs, each of which writes down how it was called.

    Args:
        there: programs that are installed from the beginning.
        user: number of the user who runs the script.
        apt: what apt-get does: `works`, `fails`, or it is `missing`.
    """

    def __init__(self, place: Path, *, there: set[str], user: int, apt: str) -> None:
        self.place = place
        self.bin = place / "bin"
        self.log = place / "log"
        self.log.touch()
        for name in ("bash", "dirname", "timeout", "chmod", "cat"):
            found = shutil.which(name)
            assert found is not None
            self.bin.mkdir(exist_ok=True)
            (self.bin / name).symlink_to(found)
        self.add("id", f"echo {user}")
        for name in ("python3", *there):
            self.add(name, "exit 0" if name == "gcc" else f'echo {name} "$@" >> {self.log}')
        if apt != "missing":
            self.add("apt-get", self._apt(works=apt == "works"))
        venv = place / "checkout" / ".venv" / "bin"
        venv.mkdir(parents=True)
        for name in ("pip", "tox"):
            self.add(name, f'echo {name} "$@" >> {self.log}', venv)
        self.add("tox", f'echo tox "$@" >> {self.log}; echo "$TEST_REMOTES" > {place}/strict', venv)
        (place / "checkout" / ".ci").mkdir()
        shutil.copy2(SCRIPT, place / "checkout" / ".ci" / "run")

    def _apt(self, *, works: bool) -> str:
        lines = [f'echo apt-get "$@" >> {self.log}']
        if not works:
            return "\n".join([*lines, "exit 100"])
        lines += ["for last; do :; done", 'if [ "$1" = install ]; then']
        lines += [f"echo '#!/bin/sh' > {self.bin}/$last; chmod +x {self.bin}/$last; fi"]
        return "\n".join(lines)

    def add(self, name: str, text: str, folder: Path | None = None) -> None:
        program = (folder or self.bin) / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)

    def run(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", self.place / "checkout" / ".ci" / "run"],
            env={"PATH": str(self.bin)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def called(self) -> list[str]:
        return self.log.read_text().splitlines()


SLOW = "tox exec --skip-pkg-install -e cu13 -- pytest -n auto --maxprocesses 8 -m slow"
TESTS = ["python3 -m venv .venv", "pip install -q tox", "tox", SLOW]


def test_root_gets_what_is_missing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, there={*SERVERS, "musl-gcc", "gcc"}, user=0, apt="works")
    done = machine.run()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    update, install, *rest = machine.called()
    assert update.startswith("apt-get update")
    assert install.startswith("apt-get install")
    assert install.endswith(" strace")
    assert rest == TESTS


@pytest.mark.parametrize(("user", "apt"), [(0, "fails"), (0, "missing"), (1000, "works")])
def test_without_them_the_tests_run_and_it_says_what_is_skipped(
    user: int, apt: str, tmp_path: Path
) -> None:
    machine = Machine(tmp_path, there=set(), user=user, apt=apt)
    done = machine.run()
    assert done.returncode == 0
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        "There is no strace",
        "There is no musl-tools",
        "There is no gcc-multilib",
        "There is no nginx",
        "There is no redis-server",
    ]
    called = [line for line in machine.called() if not line.startswith("apt-get")]
    assert called == TESTS
    assert (user == 0) or called == machine.called()


def test_nothing_is_installed_where_all_is_there(tmp_path: Path) -> None:
    machine = Machine(tmp_path, there=PROGRAMS, user=0, apt="works")
    assert machine.run().returncode == 0
    assert machine.called() == TESTS


def test_a_failing_test_run_fails_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path, there=PROGRAMS, user=0, apt="missing")
    machine.add("tox", 'test "$1" = exec || exit 3', tmp_path / "checkout" / ".venv" / "bin")
    assert machine.run().returncode == 3


def test_a_failing_slow_test_fails_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path, there=PROGRAMS, user=0, apt="missing")
    machine.add("tox", 'test "$1" != exec || exit 3', tmp_path / "checkout" / ".venv" / "bin")
    assert machine.run().returncode == 3


@pytest.mark.parametrize("apt", ["works", "fails"])
def test_with_the_servers_none_of_their_tests_is_skipped(apt: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, there=BUILD, user=0, apt=apt)
    assert machine.run().returncode == 0
    assert (tmp_path / "strict").read_text().strip() == ("1" if apt == "works" else "")


def test_a_server_that_should_be_there_and_is_not_fails_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path, there={*BUILD, "nginx"}, user=0, apt="missing")
    machine.add("apt-get", "exit 0")
    done = machine.run()
    assert done.returncode == 1
    assert done.stderr == "There is no redis-server, although it was installed.\n"
