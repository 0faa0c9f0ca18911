"""What an import loads, and how backends are found."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from core.helpers import python

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


def test_kcache_runs_where_assertions_are_off(tmp_path: Path) -> None:
    done = python("import kcache", environ={"PYTHONOPTIMIZE": "2"})
    assert done.returncode == 0, done.stderr
    assert sys.flags.optimize == 0
