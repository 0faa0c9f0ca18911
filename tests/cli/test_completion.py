"""Completion in shells: keys of entries, bounded in time, and never an error."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.helpers import damage, fill, kernel, key

from kcache.cli import completion
from kcache.cli.completion import completed

A, B, C = (key(n) for n in range(3))


@pytest.fixture
def filled(cache_directory: Path) -> Path:
    entries = {
        A: kernel(names=["k<a:b>"]),
        B: kernel(source="$(rm).cu\n"),
        C: kernel(source="日本.cu"),
    }
    fill(cache_directory, entries)
    return cache_directory


def asked(run: Callable, words: str, shell: str = "bash", **settings: str) -> tuple[int, str, str]:
    """Return code, output and errors of what a shell runs to complete the last word."""
    done = run(
        _KCACHE_COMPLETE=f"{shell}_complete",
        COMP_WORDS=words,
        COMP_CWORD=str(len(words.split(" ")) - 1),
        **settings,
    )
    # An empty line is what click says where there is nothing.
    return done.returncode, done.stdout.decode().lstrip("\n"), done.stderr.decode()


@pytest.mark.parametrize("command", ["show", "extract", "rm"])
def test_keys_are_completed(command: str, filled: Path, run: Callable) -> None:
    assert asked(run, f"kcache {command} {A[:3]}") == (0, f"plain,{A[:12]}\n", "")


def test_the_last_used_comes_first_with_what_it_is(filled: Path) -> None:
    found = completed(None, "")
    assert [item.value for item in found] == [name[:12] for name in (C, B, A)]
    told = [item.help for item in found]
    assert told[0] == "sm_90 日本.cu"
    assert told[2] == "sm_90 axpy.cu  k<a b>"
    assert not set("".join(map(str, told))) & set("\n$:`\\\"'")
    assert [item.value for item in completed(str(filled), A[:20].upper())] == [A[:20]]
    assert completed(None, "x") == []


def test_commands_options_and_files_are_completed(run: Callable) -> None:
    assert asked(run, "kcache sh")[1] == "plain,show\n"
    assert "plain,--older-than\n" in asked(run, "kcache ls --older")[1]
    assert asked(run, "kcache compile ax")[1].startswith("file,")


def test_a_directory_in_the_line_counts(
    filled: Path, run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCACHE_DIR", str(tmp_path / "nothing"))
    assert asked(run, f"kcache show {A[:4]}") == (0, "", "")
    words = f"kcache show --directory {filled} {A[:4]}"
    assert asked(run, words) == (0, f"plain,{A[:12]}\n", "")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("broken", ["missing", "unsafe", "file", "settings", "backend", "damaged"])
def test_it_is_never_an_error(
    broken: str, run: Callable, cache_directory: Path, tmp_path: Path
) -> None:
    settings: dict[str, str] = {}
    if broken == "unsafe":
        fill(cache_directory, {A: kernel()})
        cache_directory.chmod(0o777)
    elif broken == "file":
        cache_directory.write_text("")
    elif broken == "settings":
        settings = {"KCACHE_MAX_SIZE": "5GiGs", "KCACHE_READ_ONLY": "perhaps"}
    elif broken == "backend":
        fill(cache_directory, {A: kernel()})
        settings = {"KCACHE_BACKEND": "nothing"}
    elif broken == "damaged":
        damage(cache_directory, A)
    code, out, err = asked(run, f"kcache show {A[:3]}", **settings)
    assert (code, err) == (0, "")
    there = broken in ("damaged", "backend")  # of which the commands warn
    assert out == (f"plain,{A[:12]}\n" if there else "")


def test_a_file_system_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def open_existing(_: str | None) -> None:
        go_on.wait(100)

    monkeypatch.setattr(completion, "open_existing", open_existing)
    monkeypatch.setattr(completion, "_PATIENCE", 0.01)
    assert completed(None, "") == []
    assert not go_on.is_set()
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "kcache-complete":
            thread.join(60)
    completion.logging.getLogger("kcache").disabled = False


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_made_and_completes(
    shell: str, filled: Path, run: Callable, tmp_path: Path
) -> None:
    script = run(_KCACHE_COMPLETE=f"{shell}_source")
    assert (script.returncode, script.stderr) == (0, b"")
    assert b"kcache" in script.stdout
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    source = tmp_path / "script"
    source.write_bytes(script.stdout)
    if shell != "bash":
        assert subprocess.run([shell, "-n", source], timeout=60, check=False).returncode == 0
        return
    program = tmp_path / "kcache"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m kcache "$@"\n')
    program.chmod(0o755)
    line = (
        f'PATH="{tmp_path}:$PATH"; . "{source}"; COMP_WORDS=(kcache show {A[:3]}); COMP_CWORD=2; '
        '_kcache_completion kcache; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=60, check=False)
    assert (done.stdout.decode().strip(), done.stderr) == (A[:12], b"")
