"""What holds for every command: exit codes, one-line errors, pipes, the missing extra."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.helpers import NOBODY, can_become_nobody, fill, kernel, key, nobodys_directory

import kcache
from kcache.cli.app import app

COMMANDS = [
    "demo",
    "compile",
    "why",
    "warm",
    "run",
    "server",
    "info",
    "stats",
    "report",
    "ls",
    "show",
    "extract",
    "rm",
    "trim",
    "clear",
    "verify",
    "bundle",
    "doctor",
    "migrate",
    "key",
    "config",
]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_version(here: Callable) -> None:
    assert here("--version") == (0, f"kcache {kcache.__version__}\n", "")


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_names_every_command(flag: str, here: Callable) -> None:
    said = here(flag)
    assert said.code == 0
    assert [line.split()[0] for line in said.out.split("Commands:\n")[1].splitlines()] == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_takes_a_directory(command: str, here: Callable) -> None:
    said = here(command, "-h")
    assert said.code == 0
    assert "--directory" in said.out or command in ("server", "key", "bundle")  # of others


@pytest.mark.parametrize("arguments", [("nothing",), ("info", "--nothing"), ("compile",), ()])
def test_wrong_usage_is_2_and_leaves_standard_output_alone(
    arguments: tuple[str, ...], run: Callable
) -> None:
    done = run(*arguments)
    if arguments or done.returncode:  # click 8.1 takes no command at all for --help
        assert done.returncode == 2
        assert done.stdout == b""
        assert b"Usage: kcache" in done.stderr


@pytest.mark.parametrize("command", [("compile", "-"), ("extract", "0"), ("report",)])
def test_an_empty_name_for_the_output_is_refused(command: tuple[str, ...], here: Callable) -> None:
    said = here(*command, "-o", "")
    assert said.code == 2
    assert "'' is not allowed; allowed: a file, or - for standard output" in said.err


def test_the_script_and_the_module_are_the_same(run: Callable) -> None:
    script = Path(sys.executable).with_name("kcache")
    if not script.exists():
        pytest.skip("kcache is not installed beside this interpreter")
    done = subprocess.run([script, "config"], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, run("config").stdout)


@pytest.mark.parametrize("name", ["click", "rich"])
@pytest.mark.parametrize(
    "start",
    [
        "from kcache.cli import main; sys.exit(main())",
        "import runpy; runpy.run_module('kcache', run_name='__main__')",
    ],
)
def test_without_the_extra_one_line_names_it(name: str, start: str) -> None:
    done = python(f"import sys; sys.modules[{name!r}] = None; {start}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kcache: error: ")
    assert name in done.stderr
    assert "[cli]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_importing_the_command_line_imports_neither_click_nor_rich() -> None:
    done = python("import sys, kcache.cli; print(*({'click', 'rich'} & sys.modules.keys()))")
    assert done.stdout.strip() == ""


def test_looking_at_the_cache_needs_no_rich(cache_directory: Path) -> None:
    done = python(
        "import sys; from kcache.cli.app import app; code = app.run(['info']); "
        "sys.exit(code or 'rich' in sys.modules)"
    )
    assert done.returncode == 0


#: Commands that print something of a cache with one entry, `KEY`.
KEY = key("one")
PRINTING = [
    ("config",),
    ("doctor",),
    ("extract", KEY, "-o", "-"),
    ("info",),
    ("ls", "--json"),
    ("report", "-o", "-"),
    ("show", KEY),
    ("stats", "--prometheus"),
    ("trim", "--dry-run"),
    ("verify",),
]


@pytest.mark.parametrize("command", PRINTING, ids=lambda command: command[0])
def test_a_reader_that_goes_away_ends_it_quietly(
    command: tuple[str, ...], cache_directory: Path
) -> None:
    fill(cache_directory, {KEY: kernel()})
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "kcache", *command],
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("command", PRINTING, ids=lambda command: command[0])
def test_a_full_disk_behind_standard_output_is_one_line(
    command: tuple[str, ...], cache_directory: Path
) -> None:
    fill(cache_directory, {KEY: kernel()})
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "kcache", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "kcache: error: standard output: No space left on device\n"


@pytest.mark.skipif(not can_become_nobody(), reason="another user is needed")
@pytest.mark.parametrize(
    "command",
    [
        *(command for command in PRINTING if command[0] not in ("config", "doctor")),
        ("rm", KEY),
        ("trim",),
        ("clear", "--yes"),
        ("verify", "--repair"),
        ("migrate", "--to", "lmdb"),
    ],
    ids=" ".join,
)
def test_a_directory_of_somebody_else_is_refused_in_one_line(
    command: tuple[str, ...], here: Callable
) -> None:
    with nobodys_directory() as directory:
        said = here(*command, "--directory", directory)
        assert (said.code, said.out) == (2, "")
        assert said.err.startswith("kcache: error: directory=")
        assert f"belongs to user {NOBODY}" in said.err
        assert said.err.count("\n") == 1
        assert list(directory.iterdir()) == []


def test_unprintable_paths_are_printed_somehow(here: Callable, tmp_path: Path) -> None:
    said = here("info", "--directory", tmp_path / os.fsdecode(b"\xff"))
    assert said.code == 0
    assert "nothing has been cached" in said.out


def test_an_unknown_backend_is_one_line(
    here: Callable, monkeypatch: pytest.MonkeyPatch, cache_directory: Path
) -> None:
    cache_directory.mkdir(mode=0o700)
    monkeypatch.setenv("KCACHE_BACKEND", "nothing")
    said = here("trim")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("kcache: error: KCACHE_BACKEND: backend='nothing' is not known")


def test_warnings_of_the_library_look_like_the_commands_own(
    here: Callable, cache_directory: Path
) -> None:
    with kcache.open_engine(cache_directory) as engine:
        engine.put("a" * 64, kcache.Entry({"ptx": b"p"}, {}))
    (entry,) = (path for path in cache_directory.rglob("*") if "a" * 60 in path.name)
    entry.unlink()
    entry.mkdir()
    (entry / "in the way").touch()
    said = here("clear", "--yes")
    assert all(line.startswith("kcache: ") for line in said.err.splitlines())


def test_the_app_is_a_click_command(cache_directory: Path) -> None:
    from click.testing import CliRunner

    result = CliRunner().invoke(app, ["config"])
    assert result.exit_code == 0
    assert "KCACHE_DIR" in result.output


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("list", "ls"), ("stat", "stats"), ("delete", "rm"), ("gc", "trim"), ("comple", "compile")],
)
def test_a_command_that_was_meant_is_named(typed: str, meant: str, here: Callable) -> None:
    said = here(typed)
    assert said.code == 2
    assert f"No such command {typed!r}. Did you mean `kcache {meant}`?" in said.err


def test_a_command_that_is_like_none(here: Callable) -> None:
    said = here("xyzzy")
    assert (said.code, "Did you mean" in said.err) == (2, False)
    assert "No such command 'xyzzy'." in said.err


def test_the_version_by_one_letter(here: Callable) -> None:
    assert here("-V").out == here("--version").out


# -- completion ------------------------------------------------------------------------------------


def _completed(words: str, shell: str = "bash", **environment: str) -> list[str]:
    """Returns what a shell is told at the end of `words`."""
    told = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kcache"],
        env={**os.environ, **told, **environment, "_KCACHE_COMPLETE": f"{shell}_complete"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_commands_and_keys_are_completed(cache_directory: Path) -> None:
    names = sorted(key(n, "ab" if n < 2 else "cd") for n in range(3))
    fill(cache_directory, {name: kernel() for name in names})
    assert "plain,stats" in _completed("kcache st")
    assert "plain,--name" in _completed("kcache ls --na")
    for command in ("show", "extract", "rm"):
        found = _completed(f"kcache {command} ab")
        assert sorted(found) == [f"plain,{name[:12]}" for name in names[:2]]
    assert _completed("kcache show cd", "zsh")[2:] == ["sm_90", "axpy.cu"]
    assert _completed("kcache rm ef") == []


def test_completion_is_silent_where_something_is_wrong(
    tmp_path: Path, cache_directory: Path
) -> None:
    assert _completed("kcache show ab") == []
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "a.jpg").touch()
    assert _completed("kcache show ab", KCACHE_DIR=str(folder)) == []
    assert _completed("kcache show ab", KCACHE_MAX_SIZE="5GiGs") == []
    assert sorted(path.name for path in folder.iterdir()) == ["a.jpg"]
