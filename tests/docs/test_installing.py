"""Every command that installs something works in a copy of the checkout, with the package index."""

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from core.helpers import run
from docs.pages import ROOT, Block, blocks, named, pages
from docs.test_blocks import installs

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(os.name == "nt", reason="the pages are for a POSIX shell"),
]

#: The user's home, with pip's settings and cache. Fixtures give the tests another one later.
_HOME = Path.home()
_BLOCKS = {
    f"{block.where}": block
    for path in pages()
    if named(path).partition("/")[0] != "examples"  # these install kcache from the index
    for block in blocks(path)
    if installs(block)
}


@cache
def _unreachable() -> str | None:
    """Return why no package index can be reached, or None if one can."""
    done = run(sys.executable, "-m", "pip", "index", "versions", "tox", environ=_environ())
    lines = done.stderr.strip().splitlines() or [""]
    return f"no package index can be reached: {lines[-1]}" if done.returncode else None


def _environ() -> dict[str, str]:
    settings = _HOME / ".config" / "pip" / "pip.conf"
    environ = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    environ.setdefault("PIP_CACHE_DIR", str(_HOME / ".cache" / "pip"))
    if settings.is_file():
        environ.setdefault("PIP_CONFIG_FILE", str(settings))
    return environ


def _checkout(place: Path) -> Path:
    """Copy the files that a clone would have to `place`, and return it."""
    done = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    if done.returncode:  # an unpacked sdist, which has no other files
        unwanted = shutil.ignore_patterns(".*", "__pycache__")
        return Path(shutil.copytree(ROOT, place, ignore=unwanted))
    for name in filter(None, done.stdout.split("\0")):
        source = ROOT / name
        if source.is_file():
            target = place / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return place


def _runs_when(where: str) -> pytest.MarkDecorator:
    """Return the mark for a block's test: `slow` for README.md, `long` for the other pages.

    Each test downloads hundreds of megabytes.
    """
    return pytest.mark.slow if where.startswith("README.md") else pytest.mark.long


@pytest.mark.slow
def test_an_old_python_is_refused_at_once(tmp_path: Path) -> None:
    """An old Python is refused before pip tries all versions of all dependencies, for minutes."""
    if shutil.which("python3.10") is None or run("python3.10", "--version").returncode:
        pytest.skip("Python 3.10 is not installed")
    if reason := _unreachable():
        pytest.skip(reason)
    clone = _checkout(tmp_path / "clone")
    assert run("python3.10", "-m", "venv", clone / ".venv").returncode == 0
    pip = clone / ".venv" / "bin" / "pip"
    done = run(pip, "install", ".[cu13,cli,demo]", cwd=clone, environ=_environ())
    assert done.returncode == 1
    assert "kcache needs Python 3.11 or newer, and this is Python 3.10" in done.stderr


@pytest.mark.parametrize("where", [pytest.param(w, marks=_runs_when(w)) for w in _BLOCKS])
def test_it_installs(where: str, tmp_path: Path) -> None:
    block: Block = _BLOCKS[where]
    if reason := _unreachable():
        pytest.skip(reason)
    clone = _checkout(tmp_path / "clone")
    environ = _environ()
    if "-m venv" not in block.text:  # an earlier block has created the environment
        subprocess.run([sys.executable, "-m", "venv", clone / ".venv"], check=True)
        environ["PATH"] = f"{clone / '.venv' / 'bin'}{os.pathsep}{environ.get('PATH', '')}"
    script = re.sub(r"^\$ ", "", block.text, flags=re.MULTILINE)
    script = script.replace("python3 -m venv", f"{sys.executable} -m venv")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=clone,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{where} failed:\n{done.stdout[-8000:]}"
