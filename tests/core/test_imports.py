"""What an import loads, and how backends are found."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from core.helpers import output_of, python

import kcache
from kcache import UnknownBackendError
from kcache.backend import backend_names, open_backend
from kcache_backends.file import FileBackend

MODULES = sorted(
    path.relative_to(Path(kcache.__file__).parent.parent).with_suffix("").as_posix()
    for path in Path(kcache.__file__).parent.rglob("*.py")
    if "cli" not in path.relative_to(Path(kcache.__file__).parent).parts
)


def test_only_three_modules_read_the_environment() -> None:
    found = [
        module
        for module in MODULES
        for node in ast.walk(
            ast.parse((Path(kcache.__file__).parent.parent / f"{module}.py").read_text("utf-8"))
        )
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
    ]
    assert set(found) == {"kcache/config", "kcache/environment", "kcache/dropin/environment"}


# -- backends by name --------------------------------------------------------------------------------


def test_the_first_party_backend_is_found_without_entry_points(tmp_path: Path) -> None:
    backend = open_backend("file", str(tmp_path / "file"), max_size=1000)
    assert isinstance(backend, FileBackend)
    assert (tmp_path / "file").is_dir()
    backend.close()
    assert "file" in backend_names()


def test_an_unknown_name_says_which_there_are(tmp_path: Path) -> None:
    for name in ("", "File", "../file", "kcache_backends.file:FileBackend"):
        with pytest.raises(UnknownBackendError, match=r"not known; allowed: .*file"):
            open_backend(name, str(tmp_path), max_size=1000)
    assert list(tmp_path.iterdir()) == []


def test_a_strangers_backend_is_found_through_its_entry_point(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "stranger-1.0.dist-info").mkdir(parents=True)
    (site / "stranger-1.0.dist-info" / "METADATA").write_text("Name: stranger\nVersion: 1.0\n")
    (site / "stranger-1.0.dist-info" / "entry_points.txt").write_text(
        "[kcache.backends]\nnowhere = stranger:Nowhere\n"
    )
    (site / "stranger.py").write_text(
        "from kcache.backend import NoBackend\n"
        "class Nowhere(NoBackend):\n"
        "    def __init__(self, directory, *, max_size, read_only):\n"
        "        super().__init__(f'{directory} {max_size} {read_only}')\n"
    )
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import kcache
from kcache.backend import backend_names
assert "nowhere" in backend_names()
engine = kcache.open_engine(sys.argv[2], backend="nowhere", max_size=5)
print(type(engine.backend).__module__, engine.put("0" * 64, kcache.Entry({})))
print(engine.backend.reason)
"""
    lines = output_of(code, site, tmp_path / "cache").splitlines()
    assert lines[0].startswith("stranger False")
    assert lines[1].endswith(f"{tmp_path}/cache/nowhere 5 False")


def test_kcache_runs_where_assertions_are_off(tmp_path: Path) -> None:
    done = python("import kcache", environ={"PYTHONOPTIMIZE": "2"})
    assert done.returncode == 0, done.stderr
    assert sys.flags.optimize == 0
