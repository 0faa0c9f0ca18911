"""`kcache key`: it makes keys that only their owner can read, and shows no secret."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kcache.cli.app import app
from kcache.remote.signing import read_keys

pytest.importorskip("cryptography", reason="cryptography is missing")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["key", *map(str, arguments)])


def test_a_new_key(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    assert run("new", path).exit_code == 0
    if os.name != "nt":
        assert path.stat().st_mode & 0o777 == 0o600
    (known,) = read_keys(str(path)).verifiers
    shown = run("show", path).stdout
    assert shown == f"{known.hex()}  signs and verifies\n"
    assert (tmp_path / "key.pem.pub").exists()


def test_the_public_half(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    run("new", path)
    public = tmp_path / "key.pem.pub"
    assert run("show", "--public", path).stdout == public.read_text()
    assert run("show", public).stdout.endswith("  verifies\n")


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_text("mine")
    done = run("new", path)
    assert "is not replaced" in str(done.exception)
    assert path.read_text() == "mine"
