"""Completion in shells: commands, and keys of entries; never an error."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.helpers import damage, fill, kernel, key

A, B, C = (key(n) for n in range(3))


@pytest.fixture
def asked(run: Callable) -> Callable[..., tuple[int, str, str]]:
    """Return code, output and errors of what a shell runs to complete the last word."""

    def asked(words: str, shell: str = "bash", **settings: str) -> tuple[int, str, str]:
        done = run(
            _KCACHE_COMPLETE=f"{shell}_complete",
            COMP_WORDS=words,
            COMP_CWORD=str(len(words.split(" ")) - 1),
            **settings,
        )
        # An empty line is what click says where there is nothing.
        return done.returncode, done.stdout.decode().lstrip("\n"), done.stderr.decode()

    return asked


def test_commands_options_files_and_keys_are_completed(
    cache_directory: Path, asked: Callable, tmp_path: Path
) -> None:
    fill(cache_directory, {A: kernel(names=["k<a:b>"]), B: kernel(source="$(rm).cu\n")})
    assert asked("kcache sta") == (0, "plain,stats\n", "")
    assert "plain,--older-than\n" in asked("kcache ls --older")[1]
    assert asked("kcache compile ax")[1].startswith("file,")
    assert asked(f"kcache rm {A[:3].upper()}") == (0, f"plain,{A[:12]}\n", "")
    # The last used comes first, with what it is.
    told = asked("kcache show ", "zsh")[1].split("\n")
    assert [told[1], told[4]] == [B[:12], A[:12]]
    assert [told[2], told[5]] == ["sm_90  (rm).cu n", "sm_90 axpy.cu  k<a b>"]
    words = f"kcache show --directory {cache_directory} {A[:4]}"
    elsewhere = {"KCACHE_DIR": str(tmp_path / "nothing")}
    assert asked(words, **elsewhere) == (0, f"plain,{A[:12]}\n", "")
    assert asked(f"kcache show {A[:4]}", **elsewhere) == (0, "", "")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("broken", ["unsafe", "settings", "damaged"])
def test_it_is_never_an_error(broken: str, asked: Callable, cache_directory: Path) -> None:
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


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_made_and_completes(
    shell: str, cache_directory: Path, run: Callable, tmp_path: Path
) -> None:
    fill(cache_directory, {A: kernel()})
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
