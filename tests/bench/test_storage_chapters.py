"""The probes of the comparison: what kcache does, and that they find out who does otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
from chapters.damage import _facts
from contenders.contenders import DISKCACHE, Contender, Opened
from contenders.fault_probes import MISS, SMALL_COUNT, flipped, oversize, run, truncated


def test_what_kcache_serves_after_damage(tmp_path: Path) -> None:
    for name in ("kcache `file`", "kcache `lmdb`"):
        for probe in ("truncated", "flipped"):
            place = tmp_path / f"{name} {probe}"
            place.mkdir()
            assert run(probe, name, place) == MISS


class Naive:
    """A cache of files that checks nothing, evicts everything for what is too large, and has a cap."""

    def __init__(self, folder: Path, cap: int) -> None:
        self.folder, self.cap = folder, cap
        folder.mkdir(exist_ok=True)

    def get(self, key: str) -> bytes | None:
        path = self.folder / key
        return path.read_bytes() if path.exists() else None

    def put(self, key: str, value: bytes) -> None:
        (self.folder / key).write_bytes(value)
        while sum(path.stat().st_size for path in self.folder.iterdir()) > self.cap:
            min(self.folder.iterdir(), key=lambda path: path.stat().st_mtime_ns).unlink()


def naive(folder: Path, cap: int) -> Opened:
    cache = Naive(folder, cap)
    return Opened(cache.get, cache.put, lambda: None, lambda: None)


def test_a_cache_that_checks_nothing_is_found_out(tmp_path: Path) -> None:
    wrong = Contender("naive", "peer", naive, ())
    for number, (probe, outcome) in enumerate(
        {truncated: "served", flipped: "served", oversize: f"0 of {SMALL_COUNT} kept"}.items()
    ):
        assert probe(wrong, tmp_path / str(number)) == outcome


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
