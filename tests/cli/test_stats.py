"""`kcache stats`, which is `kcache info`, too, on a cache that is filled without a compiler."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.helpers import fill, kernel, key, manifest

import kcache

KEYS = [f"{n:02x}" * 32 for n in range(3)]


@pytest.fixture
def filled(cache_directory: Path) -> Path:
    """A cache with three entries, and one hit and two misses on its counts."""
    with kcache.open_engine(cache_directory) as engine:
        for name in KEYS:
            engine.put(name, kcache.Entry({"ptx": b"p" * 1000}, {}))
        for name in (KEYS[0], "f" * 64, "e" * 64):
            engine.get(name)
    return cache_directory


def lines(text: str) -> dict[str, str]:
    """Return name -> value of an aligned table."""
    pairs = (line.split("  ", 1) for line in text.splitlines() if "  " in line)
    return {name: value.strip() for name, value in pairs}


def test_the_place_the_size_and_the_counts_of_all_processes(filled: Path, here: Callable) -> None:
    said = here("stats", KCACHE_READ_ONLY="1")
    assert said == here("info", KCACHE_READ_ONLY="1")
    table = lines(said.out)
    assert (said.code, said.err) == (0, "")
    assert (table["directory"], table["backend"]) == (str(filled), "file")
    assert table["entries"] == "3 (0 kernels, 0 manifests, 3 others)"
    assert table["hits"] == "1 (0 from memory, 1 from the backend)"
    assert (table["misses"], table["hit rate"]) == ("2", "33.3%")
    assert {"size", "average compile time", "average cache time"} <= table.keys()
    for name in ("evictions", "corrupt", "stale", "uncacheable", "errors", "coalesced"):
        assert " " in table[name], "a figure has its unit beside it"


def test_kernels_and_manifests_are_counted_apart(
    cache_directory: Path, here: Callable, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {key(n): kernel(10) for n in range(50)} | {key(f"m{n}"): manifest() for n in range(9)}
    fill(cache_directory, entries, backend)
    about = json.loads(here("stats", "--json").out)
    counts = {each: about[each] for each in ("entries", "kernels", "manifests", "others")}
    assert counts == {"entries": 59, "kernels": 50, "manifests": 9, "others": 0}
    assert about["entries_read"] == 59
    monkeypatch.setattr("kcache.admin.info._READ", 40)  # of many, a sample is read
    about = json.loads(here("stats", "--json").out)
    assert (about["entries"], about["entries_read"]) == (59, 40)
    assert about["kernels"] + about["manifests"] + about["others"] == 59
    assert "estimated from 40 entries)" in here("stats").out


def test_json_is_one_object_with_every_field(filled: Path, here: Callable) -> None:
    said = here("stats", "--json", KCACHE_MAX_SIZE="2MiB")
    figures = json.loads(said.out)
    assert said.err == ""
    assert (figures["hits"], figures["misses"], figures["puts"]) == (1, 2, 3)
    assert (figures["directory"], figures["entries"]) == (str(filled), 3)
    assert figures["size_bytes"] > 3000
    assert (figures["max_size_bytes"], figures["max_size_source"]) == (2 << 20, "KCACHE_MAX_SIZE")
    assert (figures["backend"], figures["remotes"]) == ("file", [])
    assert figures.keys() >= kcache.Stats().to_dict().keys()
