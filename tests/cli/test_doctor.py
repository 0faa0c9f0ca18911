"""`kcache doctor`, on set-ups that are really broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.helpers import (
    NOBODY,
    as_nobody,
    can_become_nobody,
    damage,
    fill,
    kernel,
    key,
    nobodys_directory,
    rows,
)
from cli.test_show import AllTerminal

pytestmark = pytest.mark.usefixtures("nvrtc")


def problems(text: str) -> list[dict[str, object]]:
    """Return the findings that are problems."""
    found = rows(text)
    assert all(set(row) - {"about"} == {"level", "topic", "what", "do"} for row in found)
    return [row for row in found if row["level"] == "problem"]


def of_the_place(text: str) -> list[dict[str, object]]:
    """Returns the problems; but where Python is installed may be closed to nobody, NVRTC with it."""
    return [row for row in problems(text) if row["topic"] != "nvrtc"]


def test_a_sound_machine(cache_directory: Path, here: Callable, backend: str) -> None:
    fill(cache_directory, {key(1): kernel()}, backend)
    said = here("doctor")
    assert (said.code, said.err) == (0, "")
    *lines, empty, last = said.out.splitlines()
    assert empty == ""
    assert last.startswith("0 problems, ")
    assert f"{backend} (there are: " in said.out
    assert f"{cache_directory} (KCACHE_DIR)" in said.out
    assert "1 read, none is damaged" in said.out
    assert "NVRTC 1" in said.out
    assert all(line.startswith(("ok  ", "warning  ", "    ")) for line in lines)
    assert problems(here("doctor", "--json").out) == []


def test_before_there_is_a_cache(cache_directory: Path, here: Callable) -> None:
    said = here("doctor")
    assert said.code == 0
    assert "which the first kernel will make" in said.out
    assert not cache_directory.exists()


@pytest.mark.skipif(not can_become_nobody(), reason="another user is needed to have no rights")
def test_directories_without_rights(here: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    with nobodys_directory() as directory:
        monkeypatch.setenv("KCACHE_DIR", str(directory))
        said = here("doctor", "--json")
        assert said.code == 1
        (problem,) = problems(said.out)
        assert f"belongs to user {NOBODY}, and you are user 0" in str(problem["what"])

        directory.chmod(0o500)
        code, out, err = as_nobody("doctor", "--json")
        assert (code, err) == (1, "")
        (problem,) = of_the_place(out)
        assert problem["what"] == f"{directory} can't be written to: Permission denied"

        directory.chmod(0o777)
        code, out, _ = as_nobody("doctor", "--json")
        (problem,) = of_the_place(out)
        assert f"chmod go-w {directory}" in str(problem["do"])

        directory.chmod(0o700)
        _, out, _ = as_nobody("doctor", "--json")
        assert of_the_place(out) == []

        code, out, _ = as_nobody("doctor", "--json", "--directory", directory.parent / "new")
        (problem,) = of_the_place(out)
        assert "can't be made: Permission denied" in str(problem["what"])


def test_damaged_entries(cache_directory: Path, here: Callable, backend: str) -> None:
    fill(cache_directory, {key(1): kernel(), key(2): kernel()}, backend)
    damage(cache_directory, key(1), backend)
    said = here("doctor")
    assert said.code == 1
    assert "1 damaged and 0 unreadable entries among the 2 that were read" in said.out
    assert "-> Run: kcache verify --repair" in said.out
    assert "1 problem, " in said.out


def test_bad_variables_are_findings(
    cache_directory: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCACHE_MAX_SIZE", "lots")
    monkeypatch.setenv("KCACHE_BACKEND", "floppy")
    said = here("doctor", "--json")
    assert (said.code, said.err) == (1, "")
    found = [str(problem["what"]) for problem in problems(said.out)]
    assert found[0].startswith("KCACHE_MAX_SIZE='lots' is not allowed")
    assert found[1] == "there is no backend 'floppy'"


def test_a_backend_that_there_is_not_is_one_finding(
    cache_directory: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no advice to move the entries into it."""
    fill(cache_directory, {key(1): kernel()})
    monkeypatch.setenv("KCACHE_BACKEND", "redis")
    said = here("doctor", "--json")
    (problem,) = problems(said.out)
    assert problem["what"] == "there is no backend 'redis'"
    assert [row for row in rows(said.out) if "redis" in str(row["what"]) + str(row["do"])] == [
        problem
    ]


def test_variables_that_kcache_does_not_read_are_findings(
    cache_directory: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCACHE_MAXSIZE", "5GiB")
    monkeypatch.setenv("KCACHE_COLOUR", "red")
    monkeypatch.setenv("KCACHE_DROPIN_SOCKET", "/somewhere")  # `kcache run` sets it
    said = here("doctor", "--json")
    assert said.code == 1
    found = {problem["what"]: problem["do"] for problem in problems(said.out)}
    assert found["kcache reads no variable KCACHE_MAXSIZE"] == "Rename it to KCACHE_MAX_SIZE."
    assert "Unset it" in str(found["kcache reads no variable KCACHE_COLOUR"])
    assert not any("DROPIN" in str(what) for what in found)


def test_a_directory_that_is_no_path_is_wrong_usage(here: Callable) -> None:
    said = here("doctor", "--directory", "")
    assert said.code == 2
    assert said.err.startswith("kcache: error: directory=''")


BROKEN = """
import sys
{break_it}
from kcache.cli.app import app
sys.exit(app.run(["doctor", "--json"]))
"""


@pytest.mark.parametrize("name", ["xxhash", "lmdb", "zstandard", "platformdirs"])
def test_a_missing_library_is_named(name: str, cache_directory: Path, run: Callable) -> None:
    fill(cache_directory, {key(1): kernel()})
    code = BROKEN.format(break_it=f"sys.modules[{name!r}] = None")
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr == b""
    (problem,) = problems(done.stdout.decode())
    assert f"{name} can't be imported" in str(problem["what"])


@pytest.mark.parametrize(
    ("break_it", "what", "do"),
    [
        (
            "import kcache.nvrtc.library as l; l.find = lambda: None; sys.modules['cuda.bindings'] = None",
            "NVRTC, the compiler, is not installed",
            "[cu13]'",
        ),
        ("import kcache.nvrtc.library as l; l._BUILTINS = ('no',)", "builtins library", "again"),
        (
            "import kcache.admin.machine_facts as f; f.driver_version = lambda: (11, 8)",
            "the driver is older than the toolkit: the driver supports CUDA 11.8",
            "Update the driver",
        ),
    ],
)
def test_a_broken_compiler_or_driver_is_named(
    break_it: str, what: str, do: str, cache_directory: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", BROKEN.format(break_it=break_it)],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    found = [row for row in problems(done.stdout.decode()) if what in str(row["what"])]
    assert len(found) == 1
    assert do in str(found[0]["do"])


def test_lines_fit_on_the_terminal(cache_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KCACHE_DISABLE", "1")
    with AllTerminal("doctor") as terminal:
        code, _, seen = terminal.end()
    assert code == 0
    assert b"\x1b[33mwarning" in seen
    long = [line for line in seen.decode().splitlines() if len(line) > 80 and "\x1b" not in line]
    assert all(" " not in line.strip() for line in long)  # paths


def test_a_pipe_gets_no_colours(cache_directory: Path, run: Callable) -> None:
    done = run("doctor")
    assert b"\x1b" not in done.stdout
    assert os.path.basename(cache_directory).encode() in done.stdout
    assert json.loads(run("doctor", "--json").stdout)
