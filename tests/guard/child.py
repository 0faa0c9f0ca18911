"""Child: fresh interpreters in which the guard measures, away from what pytest has loaded."""

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from guard.operations import MARK

_TESTS = Path(__file__).parent.parent
#: Calls that read or write no file: memory, threads, clocks, who the process is.
_LEFT_OUT = re.compile(
    r"(?:m|munm|mrem)ap|mprotect|madvise|brk|futex|sched_yield|rt_sig\w+|clone3?|clock_\w+"
    r"|gettimeofday|getrandom|restart_syscall|get(?:p|t|u|eu|g|eg)id|lseek|ioctl"
)
_CALL = re.compile(r"(\d+) +(\w+)\((.*)")


def environment(home: Path) -> dict[str, str]:
    """Returns a child's variables: no settings of kcache or Python, helpers of the tests found."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KCACHE_", "PYTHON", "XDG_"))}
    # Not the working directory, where the sources may lie beside an installed package.
    return kept | {"HOME": str(home), "PYTHONPATH": str(_TESTS), "PYTHONSAFEPATH": "1"}


def code(text: str, *arguments: object) -> list[str]:
    """Returns the command that runs Python code."""
    return [sys.executable, "-c", text, *map(str, arguments)]


def measuring(folder: Path, what: str) -> list[str]:
    """Returns the command that measures operations in a folder; see `guard.operations`."""
    return [sys.executable, "-m", "guard.operations", str(folder), what]


def output(command: list[str], home: Path) -> str:
    """Returns what a command prints; it must succeed."""
    done = subprocess.run(
        command, env=environment(home), cwd=home, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def no_strace() -> str | None:
    """Return why system calls can't be counted here, or None if they can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    command = ["strace", "-f", "-o", os.devnull, "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"strace does not work: {done.stderr.strip()[:200]}"


def calls(command: list[str], home: Path) -> dict[str, list[str]]:
    """Runs a command under strace; returns the calls that its first process makes between marks.

    Of several runs of an operation, it returns the one with the fewest calls.
    """
    found: dict[str, list[list[str]]] = {}
    with TemporaryDirectory() as folder:
        log = Path(folder, "calls")
        output(["strace", "-f", "-qq", "-s", "400", "-o", str(log), *command], home)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    first = lines[0].split()[0]
    current: list[str] | None = None
    for line in lines:
        match = _CALL.match(line)
        if match is None or match[1] != first or _LEFT_OUT.fullmatch(match[2]):
            continue
        if (begun := re.search(rf'"{MARK}/begin ([^"]*)"', match[3])) is not None:
            found.setdefault(begun[1], []).append(current := [])
        elif f'"{MARK}/end"' in match[3]:
            current = None
        elif current is not None:
            current.append(f"{match[2]}({match[3]}")
    return {name: min(runs, key=len) for name, runs in found.items()}
