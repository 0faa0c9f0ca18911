"""Every command that installs does so: in a copy of the checkout, from the package index."""

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

#: Before any fixture gives the test a home of its own: pip's settings and its cache.
_HOME = Path.home()
_BLOCKS = {
    f"{block.where}": block
    for path in pages()
    if named(path).partition("/")[0] != "examples"  # these need kcache from the index
    for block in blocks(path)
    if installs(block)
}


@cache
def _unreachable() -> str | None:
    """Returns why packages can't be had, or None."""
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
    """Returns a copy of what a clone holds."""
    done = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    if done.returncode:  # an unpacked sdist, which holds nothing else
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
    """Each of them downloads some hundred megabytes: those that all begin with in each run."""
    return pytest.mark.slow if where.startswith("README.md") else pytest.mark.long


@pytest.mark.slow
def test_an_old_python_is_refused_at_once(tmp_path: Path) -> None:
    """pip would try every version of every dependency first, for minutes."""
    if shutil.which("python3.10") is None or run("python3.10", "--version").returncode:
        pytest.skip("there is no Python 3.10")
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
    if "-m venv" not in block.text:  # the reader has made one before
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
    assert done.returncode == 0, f"{where}:\n{done.stdout[-8000:]}"
