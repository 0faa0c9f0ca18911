"""Rules for every command: exit codes, one-line errors, pipes, `--json`, and a missing extra."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from cli.helpers import damage, fill, kernel
from core.helpers import command, key, python

import kcache
from kcache.cli.app import app

COMMANDS = app.list_commands(click.Context(app))
#: Commands that print no data: they print a path, a file, the output of a program, or a message.
WITHOUT_JSON = {
    *("kcache path", "kcache run", "kcache report", "kcache extract", "kcache key new"),
    *("kcache server start", "kcache server stop"),
}


def leaves(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield the full name of every command, and the command. Groups are not yielded themselves."""
    context = click.Context(group)
    for each in group.list_commands(context):
        command = group.get_command(context, each)
        assert command is not None
        if isinstance(command, click.Group):
            yield from leaves(command, f"{name} {each}")
        else:
            yield f"{name} {each}", command


def test_the_version_and_a_help_that_names_every_command_in_groups(here: Callable) -> None:
    assert here("--version") == here("-V") == (0, f"kcache {kcache.__version__}\n", "")
    said = here("-h")
    assert said == here("--help")
    groups = re.findall(r"^([A-Z][^:\n]*):\n((?:  .+\n)+)", said.out, re.M)
    lines = [line for _, text in groups[1:] for line in text.splitlines()]
    assert [line.split()[0] for line in lines] == COMMANDS


def test_every_command_that_prints_facts_has_json() -> None:
    missing = {
        name
        for name, command in leaves(app, "kcache")
        if not any("--json" in param.opts for param in command.params)
    }
    assert missing == WITHOUT_JSON


@pytest.mark.parametrize("arguments", [("nothing",), ("info", "--nothing"), ("compile",), ()])
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...], here: Callable) -> None:
    said = here(*arguments)
    if arguments or said.code:  # click 8.1 treats a missing command as --help
        assert (said.code, said.out) == (2, "")
        assert "Usage: kcache" in said.err


@pytest.mark.parametrize(("typed", "meant"), [("lss", "ls"), ("comple", "compile"), ("xyzzy", "")])
def test_a_command_that_was_meant_is_named(typed: str, meant: str, here: Callable) -> None:
    said = here(typed)
    # click 8.4 and later suggest a command
    hint = f" Did you mean {meant!r}?" if meant and hasattr(click, "NoSuchCommand") else ""
    assert said.code == 2
    assert said.err.endswith(f"No such command {typed!r}.{hint}\n")


def test_path_is_the_directory_of_the_cache(
    run: Callable, here: Callable, cache_directory: Path, tmp_path: Path
) -> None:
    assert here("path").out == f"{cache_directory}\n"
    strange = tmp_path / os.fsdecode(b"\xff [red]x")
    assert run("path", "--directory", strange).stdout == os.fsencode(strange) + b"\n"
    assert not cache_directory.exists()


@pytest.mark.parametrize(
    ("name", "command"),
    [("click", ["path"]), ("rich", ["stats"]), ("jinja2", ["report", "-o", "-"])],
)
def test_a_missing_extra_is_named(name: str, command: list[str], cache_directory: Path) -> None:
    fill(cache_directory, {})
    start = f"sys.argv[1:] = {command}; runpy.run_module('kcache', run_name='__main__')"
    done = python(f"import runpy, sys; sys.modules[{name!r}] = None; {start}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kcache: error: ")
    assert name in done.stderr.lower()
    assert "[cli]'" in done.stderr
    assert done.stderr.count("\n") == 1


# -- where the output goes -------------------------------------------------------------------------

KEY = key("one")


@pytest.mark.parametrize("command", [("ls", "--json"), ("verify",), ("extract", KEY, "-o", "-")])
def test_closed_pipe_and_full_disk(command: tuple[str, ...], cache_directory: Path) -> None:
    fill(cache_directory, {KEY: kernel()})
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    line = [sys.executable, "-P", "-m", "kcache", *command]
    told = b"kcache: error: standard output: No space left on device\n"
    for stdout, expected in ((writer, (141, b"")), (full, (1, told))):
        done = subprocess.run(line, stdout=stdout, stderr=subprocess.PIPE, check=False)
        os.close(stdout)
        assert (done.returncode, done.stderr) == expected


@pytest.mark.parametrize("command", ["compile k.cu --arch sm_90", f"extract {KEY}", "report"])
@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("/dev/full", "No space left on device"),
        ("no/out", "No such file or directory"),
        ("folder", "Is a directory"),
    ],
)
def test_an_output_that_cannot_be_written_is_one_line(
    command: str,
    output: str,
    why: str,
    work: Path,
    here: Callable,
    cache_directory: Path,
    nvrtc: object,
) -> None:
    (work / "k.cu").write_text("__global__ void k() {}\n")
    (work / "folder").mkdir()
    fill(cache_directory, {KEY: kernel()})
    said = here(*command.split(), "-o", output)
    assert (said.code, said.out) == (1, "")
    assert said.err == f"kcache: error: {output}: {why}\n"
    assert sorted(path.name for path in work.iterdir()) == ["axpy.cu", "folder", "k.cu"]


# -- problems with the cache -----------------------------------------------------------------------


NOTHING = "kcache: nothing has been cached yet\n"


@pytest.mark.parametrize(
    ("command", "code", "out", "err"),
    [
        ("ls", 0, "", NOTHING),
        ("stats --zero", 0, "hits", f"{NOTHING}kcache: the counts were set to zero\n"),
        ("stats --json", 0, '"hits": 0,', NOTHING),
        ("verify", 0, "0 entries read, 0 B\n", NOTHING),
        ("trim", 0, "evicted 0 entries, 0 B\n", NOTHING),
        ("trim --json --dry-run", 0, '"entries": 0,', NOTHING),
        ("clear --yes", 0, "deleted 0 entries", NOTHING),
        ("migrate --to lmdb", 0, "nothing to move\n", NOTHING),
        ("why axpy.cu --arch sm_90 --json", 0, '"cause": "no_cache",', ""),
        ("report", 1, "", f"{NOTHING}kcache: error: there is no cache in "),
        ("bundle export -o x.kcb", 1, "", f"{NOTHING}kcache: error: nothing can be exported: "),
        ("bundle verify x.kcb", 1, "", "No such file"),
        *((f"{name} abcd", 1, "", "no entry has a key") for name in ("show", "extract", "rm")),
    ],
)
@pytest.mark.usefixtures("nvrtc")
def test_no_command_creates_a_cache(
    command: str, code: int, out: str, err: str, work: Path, here: Callable, cache_directory: Path
) -> None:
    said = here(*command.split())
    assert (said.code, bool(said.out), bool(said.err)) == (code, bool(out), bool(err))
    assert out in said.out
    assert err in said.err
    assert not cache_directory.exists()
    assert os.listdir(work) == ["axpy.cu"]


@pytest.mark.parametrize("variable", ["KCACHE_READ_ONLY", "KCACHE_DISABLE"])
@pytest.mark.parametrize(
    "command",
    [
        *("trim --max-size 0", f"rm {KEY}", "clear --yes", "verify --repair", "migrate --to zstd"),
        *("config --set wait=3", "stats --zero", "bundle import x.kcb", "warm k.toml"),
    ],
)
def test_a_read_only_or_disabled_cache_is_not_changed(
    variable: str, command: str, work: Path, cache_directory: Path, here: Callable
) -> None:
    fill(cache_directory, {KEY: kernel()})
    (work / "k.toml").write_text('[[kernels]]\nsource = "axpy.cu"\narch = "sm_90"\n')
    before = {path: path.stat().st_mtime_ns for path in cache_directory.rglob("*")}
    said = here(*command.split(), **{variable: "1"})
    assert (said.code, said.out) == (2, "")
    assert re.match(
        rf"kcache: error: {variable} is set, but {command.split(maxsplit=1)[0]}.* would ", said.err
    )
    assert before == {path: path.stat().st_mtime_ns for path in cache_directory.rglob("*")}


# -- completion in shells: commands, and keys of entries; never an error ---------------------------

A, B, C = (key(n) for n in range(3))


def asked(words: str, shell: str = "bash", **settings: str) -> tuple[int, str, str]:
    """Complete the last word as a shell would; return the exit code, the output and the errors."""
    settings |= {"_KCACHE_COMPLETE": f"{shell}_complete", "COMP_WORDS": words}
    done = command(environ={**settings, "COMP_CWORD": str(len(words.split(" ")) - 1)})
    # If there are no completions, click prints an empty line.
    return done.returncode, done.stdout.lstrip("\n"), done.stderr


def test_shell_completion(cache_directory: Path, tmp_path: Path) -> None:
    fill(cache_directory, {A: kernel(names=["k<a:b>"]), B: kernel(source="$(rm).cu\n")})
    assert asked("kcache sta") == (0, "plain,stats\n", "")
    assert "plain,--older-than\n" in asked("kcache ls --older")[1]
    assert asked("kcache compile ax")[1].startswith("file,")
    assert asked(f"kcache rm {A[:3].upper()}") == (0, f"plain,{A[:12]}\n", "")
    # The most recently used entry comes first.
    told = asked("kcache show ", "zsh")[1].split("\n")
    assert [told[1], told[4]] == [B[:12], A[:12]]
    words = f"kcache show --directory {cache_directory} {A[:4]}"
    elsewhere = {"KCACHE_DIR": str(tmp_path / "nothing")}
    assert asked(words, **elsewhere) == (0, f"plain,{A[:12]}\n", "")
    assert asked(f"kcache show {A[:4]}", **elsewhere) == (0, "", "")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("broken", ["unsafe", "settings", "damaged"])
def test_it_is_never_an_error(broken: str, cache_directory: Path) -> None:
    settings: dict[str, str] = {}
    if broken == "unsafe":
        fill(cache_directory, {A: kernel()})
        cache_directory.chmod(0o777)
    elif broken == "settings":
        settings = {"KCACHE_MAX_SIZE": "5GiGs", "KCACHE_READ_ONLY": "perhaps"}
    else:
        damage(cache_directory, A)
    code, out, err = asked(f"kcache show {A[:3]}", **settings)
    assert (code, err) == (0, "")
    assert out == (f"plain,{A[:12]}\n" if broken == "damaged" else "")
