"""Child: fresh interpreters in which the guard measures, away from what pytest has loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["code", "environment", "measuring", "output"]

_TESTS = Path(__file__).parent.parent
#: The path where pytest finds shared modules, too.
_HELPERS = (_TESTS, _TESTS.parent / "bench")


def environment(home: Path) -> dict[str, str]:
    """Returns a child's variables: no settings of kcache or Python, helpers of the tests found."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KCACHE_", "PYTHON", "XDG_"))}
    # Not the working directory, where the sources may lie beside an installed package.
    path = os.pathsep.join(map(str, _HELPERS))
    return kept | {"HOME": str(home), "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def code(text: str, *arguments: object) -> list[str]:
    """Returns the command that runs Python code."""
    return [sys.executable, "-c", text, *map(str, arguments)]


def measuring(kind: str, folder: Path, *, compiler: bool) -> list[str]:
    """Returns the command that measures all scenarios in an empty folder; see `guard.measure`."""
    more = (kind, str(folder), "yes" if compiler else "no")
    return [sys.executable, "-m", "guard.measure", *more]


def output(command: list[str], home: Path) -> str:
    """Returns what a command prints; it must succeed."""
    done = subprocess.run(
        command, env=environment(home), cwd=home, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
