"""The probes of the comparison: what kcache does, and that they find out who does otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
from chapters.damage import _facts
from contenders.contenders import DISKCACHE
from contenders.fault_probes import MISS, run


def test_what_kcache_serves_after_damage(tmp_path: Path) -> None:
    for name in ("kcache `file`", "kcache `lmdb`"):
        for probe in ("truncated", "flipped"):
            place = tmp_path / f"{name} {probe}"
            place.mkdir()
            assert run(probe, name, place) == MISS


@pytest.mark.parametrize("probe", ["header", "full", "read_only"])
def test_kernels_survive(probe: str, tmp_path: Path, nvrtc: tuple[int, int]) -> None:
    wanted = "compiled again" if probe == "header" else "kernel returned"
    assert run(probe, "kcache `file`", tmp_path) == wanted


def test_kcache_is_one_column_and_says_which_backend_fails() -> None:
    fine = dict.fromkeys(("kcache `file`", "kcache `lmdb`"), "miss")
    (one, other) = _facts("damage", "miss", {**fine, DISKCACHE: "served"})
    assert (one.figure, one.found, one.met) == ("damage: kcache", "miss", True)
    assert (other.figure, other.found, other.met) == (f"damage: {DISKCACHE}", "served", False)
    (bad,) = _facts("damage", "miss", {**fine, "kcache `lmdb`": "served"})
    assert (bad.found, bad.met) == ("`file` miss, `lmdb` served", False)
