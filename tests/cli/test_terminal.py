"""What appears on a terminal, tested with a pseudo-terminal, and must not appear in a pipe."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest
from cli.helpers import fill, kernel
from core.helpers import key
from nvrtc.talk import slow

import kcache

KEY = key("one")

pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")


class Terminal:
    """A command whose standard input and error are a pseudo-terminal, and its output a pipe."""

    #: Whether standard output is a pipe, and not the terminal.
    to_pipe = True

    def __init__(self, *arguments: str | Path, **environment: str) -> None:
        self.master, slave = pty.openpty()
        self.seen = b""
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kcache", *map(str, arguments)],
            stdin=slave,
            stdout=subprocess.PIPE if self.to_pipe else slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", **environment},
        )
        os.close(slave)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self.master)

    def read_until(self, text: bytes) -> None:
        while text not in self.seen:
            assert self._read(), f"expected {text!r}, got {self.seen!r}"

    def write(self, text: bytes) -> None:
        os.write(self.master, text)

    def end(self) -> tuple[int, bytes, bytes]:
        """Return the exit code, the standard output, and everything that the terminal has shown."""
        while self._read():
            pass
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output, self.seen

    def _read(self) -> bool:
        try:
            more = os.read(self.master, 1 << 16)
        except OSError:  # the error of Linux when the other side has closed
            more = b""
        self.seen += more
        return bool(more)


@pytest.fixture
def line(work: Path, nvrtc: object) -> list[str | Path]:
    """The arguments for a compile that takes most of a second."""
    (work / "k.cu").write_text(slow(16))
    return ["compile", "k.cu", "--arch", "compute_90"]


class AllTerminal(Terminal):
    """A command whose standard input, output and error are the terminal."""

    to_pipe = False


def test_a_spinner_with_the_time_while_a_compile_runs(line: list[str | Path]) -> None:
    with Terminal(*line) as terminal:
        code, output, seen = terminal.end()
    assert (code, output) == (0, b"")
    assert any(dot.encode() in seen for dot in "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")
    assert b"compiling k.cu for compute_90" in seen
    # The line is erased and the cursor is shown again before the result is printed.
    assert seen.index(b"\x1b[?25l") < seen.rindex(b"\x1b[2K") < seen.index(b"kcache: compiled in ")
    assert seen.index(b"\x1b[?25h") < seen.index(b"kcache: compiled in ")
    assert b"\x1b" not in seen[seen.index(b"kcache: compiled in ") :]


@pytest.mark.parametrize(("environment", "colours"), [({"NO_COLOR": "1"}, False), ({}, True)])
def test_no_color(environment: dict[str, str], colours: bool) -> None:
    with AllTerminal("doctor", **environment) as doctor:
        seen = doctor.end()[2]
    assert bool(re.search(rb"\x1b\[[\d;]+m", seen)) == colours


def test_an_interrupt_ends_a_compile_at_once(line: list[str | Path]) -> None:
    with Terminal(*line) as terminal:
        terminal.read_until(b"compiling k.cu")
        terminal.process.send_signal(signal.SIGINT)
        code, output, seen = terminal.end()
    assert (code, output) == (130, b"")
    assert b"Traceback" not in seen
    assert seen.index(b"\x1b[?25l") < seen.index(b"\x1b[?25h")
    assert not Path("k.ptx").exists()


@pytest.fixture
def filled(cache_directory: Path) -> Path:
    with kcache.open_engine(cache_directory) as engine:
        engine.put("0" * 64, kcache.Entry({"ptx": b"p"}, {}))
    return cache_directory


@pytest.mark.parametrize(("answer", "code", "remaining"), [(b"y\n", 0, 0), (b"\n", 1, 1)])
def test_clear_asks(answer: bytes, code: int, remaining: int, filled: Path) -> None:
    with Terminal("clear") as terminal:
        terminal.read_until(b"[y/N]: ")
        terminal.write(answer)
        ended, output, seen = terminal.end()
    assert ended == code
    assert b"Delete 1 entry" in seen
    assert output.startswith(b"deleted 1 entry" if code == 0 else b"")
    with kcache.open_engine(filled) as engine:
        assert engine.entry_count == remaining


def test_an_interrupt_ends_warm_and_reports_progress(work: Path) -> None:
    loop = "\n#pragma unroll\nfor (int i = 0; i < N; ++i) x[i] = sinf(x[i]);\n"
    (work / "sin.cu").write_text(f"__global__ void k(float* x) {{{loop}}}\n")
    kernels = [{"source": "sin.cu", "defines": [f"N={number}"]} for number in (50, 51)]
    listed = {"defaults": {"arch": "sm_90"}, "kernels": kernels}
    (work / "slow.json").write_text(json.dumps(listed))
    with Terminal("warm", "slow.json", "-j", "1") as terminal:
        terminal.read_until(b"1/2")
        terminal.process.send_signal(signal.SIGINT)
        code, output, seen = terminal.end()
    assert (code, output) == (130, b"")
    assert seen.index(b"\x1b[?25l") < seen.index(b"\x1b[?25h") < seen.index(b"kcache: inter")
    assert seen.endswith(
        b"kcache: interrupted: 1 of 2 kernels done; run the command again to continue\r\n"
    )


HOSTILE = "[red]x[/red] :smile: \x1b[31m\x1b]0;title\x07\x9b1m\n\r\t\u202e.cu"


def test_names_are_escaped(cache_directory: Path, here: Callable, tmp_path: Path) -> None:
    entry = kernel(source=HOSTILE, names=[HOSTILE], log=HOSTILE, flags=[HOSTILE], arch=HOSTILE)
    fill(cache_directory, {KEY: entry})
    for command in (
        ("ls",),
        ("show", KEY),
        ("rm", "-n", KEY),
        ("extract", KEY, "-o", tmp_path / "x"),
    ):
        said = here(*command)
        assert said.code == 0
        assert all(c.isprintable() or c in "\n\t" for c in said.out + said.err), (command, said)
    with AllTerminal("ls", COLUMNS="1000") as terminal:
        assert b"[red]x[/red] :smile: \\x1b[31m\\x1b]0;title\\x07\\x9b1m\\n" in terminal.end()[2]
