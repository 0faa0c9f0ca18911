"""`kcache stats`, which is `kcache info`, too, on a cache that is filled without a compiler."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.helpers import fill, kernel, key, manifest

import kcache
from kcache.engine.stats import FIELDS, StatsFile

KEYS = [f"{n:02x}" * 32 for n in range(3)]


@pytest.fixture
def filled(cache_directory: Path) -> Path:
    """A cache with three entries, and one hit and two misses on its counts."""
    with kcache.open_engine(cache_directory) as engine:
        for name in KEYS:
            engine.put(name, kcache.Entry({"ptx": b"p" * 1000}, {}))
        engine.get(KEYS[0])
        engine.get("f" * 64)
        engine.get("e" * 64)
    return cache_directory


def lines(text: str) -> dict[str, str]:
    """Return name -> value of an aligned table."""
    pairs = (line.split("  ", 1) for line in text.splitlines() if "  " in line)
    return {name: value.strip() for name, value in pairs}


def test_the_place_the_size_and_the_counts_of_all_processes(
    filled: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCACHE_READ_ONLY", "1")
    said = here("stats")
    assert said == here("info")
    table = lines(said.out)
    assert (said.code, said.err) == (0, "")
    assert (table["directory"], table["backend"]) == (str(filled), "file")
    assert table["entries"] == "3 (0 kernels, 0 manifests, 3 others)"
    assert table["hits"] == "1 (0 from memory, 1 from the backend)"
    assert (table["misses"], table["hit rate"]) == ("2", "33.3%")
    assert {"size", "average compile time", "average cache time"} <= table.keys()
    for name in ("evictions", "corrupt", "stale", "uncacheable", "errors", "coalesced"):
        assert " " in table[name], "a figure has its unit beside it"


def test_the_sources_of_hits_add_up(cache_directory: Path, here: Callable) -> None:
    fill(cache_directory, {})
    counts = {"hits": 1234, "memory_hits": 1000, "layer_hits": 30, "remote_hits": 4}
    file = StatsFile(cache_directory / "stats")
    file.add([counts.get(name, 0) for name in FIELDS])
    told = "1,234 (1,000 from memory, 200 from the backend, 30 from layers, 4 from remotes)"
    table = lines(here("stats").out)
    assert table["hits"] == told
    assert table["remotes"] == "4 hits, 0 misses, 0 without an answer; 0 puts"


def test_a_mean_of_nothing_is_a_dash(cache_directory: Path, here: Callable) -> None:
    with kcache.open_engine(cache_directory) as engine:
        engine.put(KEYS[0], kcache.Entry({"ptx": b"p"}, {}))
    table = lines(here("stats").out)
    named = ("hit rate", "average compile time", "average cache time")
    assert [table[name] for name in named] == ["-", "-", "-"]
    assert table["compile time saved"] == "0 s"
    with kcache.open_engine(cache_directory) as engine:
        engine.get(KEYS[0])
    table = lines(here("stats").out)
    assert table["hit rate"] == "100.0%"
    assert "-" not in table["average cache time"]
    assert table["average compile time"] == "-"


def test_kernels_and_manifests_are_counted_apart(
    cache_directory: Path, here: Callable, backend: str
) -> None:
    entries = {key(n): kernel() for n in range(5)} | {key(f"m{n}"): manifest() for n in range(2)}
    fill(cache_directory, entries, backend)
    about = json.loads(here("stats", "--json").out)
    counts = {each: about[each] for each in ("entries", "kernels", "manifests", "others")}
    assert counts == {"entries": 7, "kernels": 5, "manifests": 2, "others": 0}
    assert about["entries_read"] == 7
    assert lines(here("stats").out)["entries"] == "7 (5 kernels, 2 manifests)"


def test_counting_many_entries_is_an_estimate_that_says_so(
    cache_directory: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kcache.admin.info._READ", 40)
    fill(cache_directory, {key(n): kernel(10) if n % 4 else manifest() for n in range(200)})
    about = json.loads(here("stats", "--json").out)
    assert (about["entries"], about["entries_read"]) == (200, 40)
    assert about["kernels"] + about["manifests"] + about["others"] == 200
    assert 100 <= about["kernels"] <= 190
    assert "estimated from 40 entries)" in here("stats").out


def test_json_is_one_object_with_every_field(
    filled: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCACHE_MAX_SIZE", "2MiB")
    said = here("stats", "--json")
    figures = json.loads(said.out)
    assert said.err == ""
    assert (figures["hits"], figures["misses"], figures["puts"]) == (1, 2, 3)
    assert (figures["directory"], figures["entries"]) == (str(filled), 3)
    assert figures["size_bytes"] > 3000
    assert (figures["max_size_bytes"], figures["max_size_source"]) == (2 << 20, "KCACHE_MAX_SIZE")
    assert (figures["backend"], figures["remotes"]) == ("file", [])
    assert figures.keys() >= kcache.Stats().to_dict().keys()


def test_without_a_cache(cache_directory: Path, here: Callable, tmp_path: Path) -> None:
    figures = json.loads(here("stats", "--json").out)
    assert (figures["hits"], figures["entries"]) == (0, 0)
    said = here("stats")
    assert said.code == 0
    assert said.out.splitlines() == [
        f"directory  {cache_directory}",
        "(nothing has been cached yet)",
    ]
    assert here("stats", "--zero").code == 0
    assert not cache_directory.exists()
    fill(cache_directory, {})
    assert "nothing has been cached" in here("stats", "--directory", tmp_path / "other").out


def test_zero_shows_the_counts_and_starts_again(
    filled: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCACHE_READ_ONLY", "1")
    said = here("stats", "--zero")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("kcache: error: KCACHE_READ_ONLY is set")
    monkeypatch.delenv("KCACHE_READ_ONLY")
    said = here("stats", "--json", "--zero")
    assert json.loads(said.out)["hits"] == 1
    assert "zero" in said.err
    assert json.loads(here("stats", "--json").out)["hits"] == 0


def test_a_file_in_the_place_of_the_directory_is_one_line(here: Callable, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = here("stats", "--directory", tmp_path / "file")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("kcache: error: directory=")
    assert said.err.count("\n") == 1
