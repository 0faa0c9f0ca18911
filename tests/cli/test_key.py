"""`kcache key`: it makes keys that only their owner can read, and shows no secret."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kcache.cli.app import app
from kcache.remote.keys import read_keys


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["key", *map(str, arguments)])


@pytest.mark.parametrize("kind", ["hmac", "ed25519"])
def test_a_new_key(kind: str, tmp_path: Path) -> None:
    if kind == "ed25519":
        pytest.importorskip("cryptography", reason="cryptography is missing")
    path = tmp_path / "key.pem"
    assert run("new", "--kind", kind, path).exit_code == 0
    if os.name != "nt":
        assert path.stat().st_mode & 0o777 == 0o600
    shown = run("show", path).stdout
    assert shown.startswith(read_keys(str(path)).verifiers[0].id.hex())
    assert "signs and verifies" in shown
    assert not any(line in shown for line in path.read_text().splitlines()[1:-1])
    assert (tmp_path / "key.pem.pub").exists() == (kind == "ed25519")


def test_the_public_half(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="cryptography is missing")
    path = tmp_path / "key.pem"
    run("new", path)
    public = tmp_path / "key.pem.pub"
    assert run("show", "--public", path).stdout == public.read_text()
    assert run("show", public).stdout.endswith("Ed25519, verifies\n")


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_text("mine")
    done = run("new", "--kind", "hmac", path)
    assert "is not replaced" in str(done.exception)
    assert path.read_text() == "mine"


def test_a_secret_has_no_public_half(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    run("new", "--kind", "hmac", path)
    assert "no key with a public half" in str(run("show", "--public", path).exception)
