"""`kcache key` creates keys that only their owner can read, and shows no secret."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kcache.remote.signing import read_keys

pytest.importorskip("cryptography", reason="cryptography is missing")


def test_a_new_key_and_its_public_half(here: Callable, tmp_path: Path) -> None:
    path, public = tmp_path / "key.pem", tmp_path / "key.pem.pub"
    assert here("key", "new", path).code == 0
    if os.name != "nt":
        assert path.stat().st_mode & 0o777 == 0o600
    (known,) = read_keys(str(path)).verifiers
    assert here("key", "show", path).out == f"{known.hex()}  signs and verifies\n"
    assert here("key", "show", "--public", path).out == public.read_text()
    assert here("key", "show", public).out.endswith("  verifies\n")


def test_a_file_that_is_there_stays(here: Callable, tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_text("mine")
    assert "never replaced" in here("key", "new", path).err
    assert path.read_text() == "mine"
