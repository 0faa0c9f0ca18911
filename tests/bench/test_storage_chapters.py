"""The chapters about storage, on little: what they yield, and that their probes can tell."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from chapters.damage import _facts
from chapters.sizes import sizes
from contenders.contenders import (
    BY_NAME,
    CONTENDERS,
    DISKCACHE,
    FILE_STREAM,
    MEMORY,
    Contender,
    Opened,
)
from contenders.fault_probes import MISS, SMALL_COUNT, flipped, oversize, run, truncated
from harness.findings import Point, Ratio
from harness.plan import KIB, QUICK
from harness.worker_processes import Workers

SMALL = replace(
    QUICK,
    fills=2,
    calls=2,
    value_sizes=(KIB, 100 * KIB),
    counts=(100, 1_000),
)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what takes long: nothing of it is about what is tested here."""
    monkeypatch.setattr(os, "sync", lambda: None)  # waits for whatever else this machine writes
    from chapters import sizes as sizes_module

    chosen = tuple(
        each for each in CONTENDERS if each.name in ("kcache `file`", "kcache `lmdb`", FILE_STREAM)
    )
    monkeypatch.setattr(sizes_module, "CONTENDERS", chosen)


def needs_the_peer() -> None:
    why = BY_NAME[FILE_STREAM].missing()
    if why is not None:
        pytest.skip(why)


def points(found: list[object], chart: str, series: str) -> dict[float, float]:
    """What a line of a chart shows."""
    return {
        each.x: each.y.median
        for each in found
        if isinstance(each, Point) and (each.chart, each.series) == (chart, series)
    }


def test_sizes_have_points_for_each_size_and_ratios_at_100_kib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_the_peer()
    found = list(sizes(SMALL, tmp_path))
    for series in (
        "kcache `file`",
        "kcache `lmdb`",
        FILE_STREAM,
        "raw file read",
        "raw LMDB get",
        MEMORY.name,
    ):
        line = points(found, "get against size", series)
        assert set(line) == {KIB, 100 * KIB}
        assert all(0 < y < 1 for y in line.values())
    ratios = {(each.figure, each.against) for each in found if isinstance(each, Ratio)}
    assert ("kcache `file`, get of 100 KiB", FILE_STREAM) in ratios
    assert ("kcache `lmdb`, get of 100 KiB", "raw LMDB get") in ratios
    assert not [figure for figure, _ in ratios if figure.startswith("kcache memory, put")]
    assert not list(tmp_path.iterdir())


def test_a_worker_that_ends_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="a worker ended with status 1"):
        Workers("no_such_module_at_all", 1, ())


# -- probes ----------------------------------------------------------------------------------------


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
