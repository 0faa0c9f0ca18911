"""`kcache doctor --program` finds out from a program's file whether `kcache run` works for it."""

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from core.helpers import not_emulated

from kcache.doctor import OK, PROBLEM, WARNING
from kcache.doctor.local_checks import diagnose_program
from kcache.dropin import build

SHELL = os.path.realpath(shutil.which("sh") or "/bin/sh")


def told(name: object) -> tuple[str, str]:
    """Return the level and the text of the only finding about a program."""
    (finding,) = diagnose_program(str(name))
    return finding.level, finding.what


def program(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(0o755)
    return path


def test_an_ordinary_program() -> None:
    assert told("sh") == (OK, f"{SHELL} is reached, if it loads NVRTC")


def test_an_invalid_program_is_a_problem(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o700)
    for name in ("no-such-program", "", tmp_path, tmp_path / "pipe"):
        assert told(name) == (PROBLEM, f"there is no program {name}")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "glibc does not load it: {}: file too short"),
        (b"\x7fELF\x01\x01" + bytes(99), "glibc does not load it: {}: wrong ELF class: ELFCLASS32"),
        (b"no program" * 99, "glibc does not load it: {}: invalid ELF header"),
        (b"#!", "its first line names no program"),
        (b"#!/no/such/interpreter\n", "its first line names no program"),
        (b"#!/usr/bin/env -S A=1\n", "its first line names no program"),
    ],
)
def test_unreachable_programs(content: bytes, reason: str, tmp_path: Path) -> None:
    path = program(tmp_path / "program", content)
    assert told(path) == (WARNING, f"{path} is not reached: {reason.format(path)}")


def test_a_set_uid_program(tmp_path: Path) -> None:
    path = program(tmp_path / "program", Path(SHELL).read_bytes())
    path.chmod(0o4755)
    assert told(path)[1].endswith(
        "it is set-uid or set-gid, so the loader does not add kcache's libraries"
    )


def test_a_script_is_what_its_interpreter_is(tmp_path: Path) -> None:
    for line in (SHELL, f"{SHELL} -e", "/usr/bin/env sh", "/usr/bin/env -S A=1 sh -e"):
        path = program(tmp_path / "script", f"#!{line}\n")
        assert told(path) == (OK, f"{path} (run by {SHELL}) is reached, if it loads NVRTC")
    second = program(tmp_path / "second", f"#!{tmp_path / 'script'}\n")
    assert told(second)[0] == OK
    inner = program(tmp_path / "inner", b"no program")
    path = program(tmp_path / "script", f"#!{inner}\n")
    reason = f"is not reached: glibc does not load it: {inner}: file too short"
    assert told(path) == (WARNING, f"{path} (run by {inner}) {reason}")
    itself = tmp_path / "itself"
    assert told(program(itself, f"#!{itself}\n"))[0] == WARNING


@not_emulated("crashes when the loader lists a static program")
def test_a_program_linked_statically(tmp_path: Path) -> None:
    compiler = build.compiler()
    (tmp_path / "program.c").write_text("int main(void) { return 0; }")
    command = [str(compiler), "-static", "program.c", "-o", "program"]
    if compiler is None or subprocess.run(command, cwd=tmp_path, check=False).returncode != 0:
        pytest.skip("a C compiler or a static C library is not installed")
    assert told(tmp_path / "program")[1].endswith("it is linked statically")


def test_damaged_programs(tmp_path: Path) -> None:
    """A damaged file leads to a finding, and not to an error."""
    sound = Path(SHELL).read_bytes()[:20_000]
    draw = random.Random(7)
    for _ in range(40):
        content = bytearray(sound)
        for _ in range(draw.randrange(1, 4)):
            at, size = draw.randrange(800), draw.choice((1, 4, 8))
            content[at : at + size] = draw.choice((b"\xff", b"\0", b"\x41")) * size
        content[:6] = b"\x7fELF\x02\x01"
        assert told(program(tmp_path / "program", bytes(content)))[0] in (OK, WARNING)
