"""`kcache stats` and its second name `kcache info`, on a cache whose entries were not compiled."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.helpers import fill, kernel, manifest
from core.helpers import key

import kcache
from kcache import Stats
from kcache.admin.info import exposition
from kcache.backend import Usage
from kcache.engine.stats import FIELDS

KEYS = [f"{n:02x}" * 32 for n in range(3)]


@pytest.fixture
def filled(cache_directory: Path) -> Path:
    """A cache that has three entries, and has counted one hit and two misses."""
    with kcache.open_engine(cache_directory) as engine:
        for name in KEYS:
            engine.put(name, kcache.Entry({"ptx": b"p" * 1000}, {}))
        for name in (KEYS[0], "f" * 64, "e" * 64):
            engine.get(name)
    return cache_directory


def test_the_place_the_size_and_the_counts_of_all_processes(filled: Path, here: Callable) -> None:
    said = here("stats", KCACHE_READ_ONLY="1")
    assert said == here("info", KCACHE_READ_ONLY="1")
    pairs = (line.split("  ", 1) for line in said.clean().splitlines() if "  " in line)
    table = {name: value.strip() for name, value in pairs}
    assert (table["directory"], table["backend"]) == (str(filled), "file")
    assert table["entries"] == "3 (0 kernels, 0 manifests, 3 others)"
    assert table["hits"] == "1 (0 from memory, 1 from the backend)"
    assert (table["misses"], table["hit rate"]) == ("2", "33.3%")
    assert {"size", "average compile time", "average cache time"} <= table.keys()
    for name in ("evictions", "corrupt", "stale", "uncacheable", "errors", "coalesced"):
        assert " " in table[name], "a figure needs its unit"


def test_kernels_and_manifests_are_counted_apart(
    cache_directory: Path, here: Callable, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {key(n): kernel(10) for n in range(50)} | {key(f"m{n}"): manifest() for n in range(9)}
    fill(cache_directory, entries, backend)
    about = json.loads(here("stats", "--json").out)
    counts = {each: about[each] for each in ("entries", "kernels", "manifests", "others")}
    assert counts == {"entries": 59, "kernels": 50, "manifests": 9, "others": 0}
    assert about["entries_read"] == 59
    monkeypatch.setattr("kcache.admin.info._READ", 40)  # if there are more, a sample is read
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


# -- the output for Prometheus ---------------------------------------------------------------------


def parsed(text: str) -> dict[str, Any]:
    """Parse the text with Prometheus' own parser; return the families of metrics by name."""
    parser = pytest.importorskip("prometheus_client.parser")
    families = list(parser.text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    assert text.endswith("\n")
    assert not re.search(r"\n\n|\r", text)
    return {family.name: family for family in families}


def values(families: dict[str, Any]) -> dict[str, float]:
    return {s.name: s.value for family in families.values() for s in family.samples}


def test_the_counts_of_a_cache(cache_directory: Path, here: Callable, backend: str) -> None:
    found = values(parsed(here("stats", "--prometheus").out))
    assert (found["kcache_hits_total"], found["kcache_max_size_bytes"]) == (0, 1 << 30)
    assert not cache_directory.exists()
    fill(cache_directory, {key(n): kernel() for n in range(3)}, backend)
    with kcache.KernelCache(cache_directory) as cache:
        cache.engine.get(key(0))
        cache.engine.get("f" * 64)
        size = cache.size_bytes
    said = here("stats", "--prometheus", "--zero", KCACHE_MAX_SIZE="64MiB")
    families = parsed(said.out)  # the counts before they were reset
    found = values(families)
    assert (found["kcache_hits_total"], found["kcache_misses_total"]) == (1, 1)
    assert (found["kcache_puts_total"], found["kcache_entries"]) == (3, 3)
    assert found["kcache_saved_seconds_total"] == 0.25
    assert (found["kcache_size_bytes"], found["kcache_max_size_bytes"]) == (size, 64 << 20)
    (about,) = families["kcache_info"].samples
    assert about.labels == {
        "version": kcache.__version__,
        "directory": str(cache_directory),
        "backend": backend,
    }
    assert values(parsed(here("stats", "--prometheus").out))["kcache_puts_total"] == 0
    assert here("stats", "--json", "--prometheus").code == 2


def test_every_count_is_there_and_named_by_the_rules() -> None:
    numbers = {name: n + 1.0 for n, name in enumerate(FIELDS)}
    families = parsed(exposition(Stats(**numbers), Usage(5, 6), 7, {}))  # type: ignore[arg-type]
    counters = {name: f for name, f in families.items() if f.type == "counter"}
    assert sorted(values(counters).values()) == sorted(numbers.values())
    for name, family in families.items():
        assert re.fullmatch(r"kcache(_[a-z]+)+", name)
        assert family.documentation.endswith(".")
        for sample in family.samples:
            assert sample.name.endswith("_total") == (name in counters)
            assert not sample.labels or name == "kcache_info"
            assert sample.timestamp is None  # a textfile collector refuses timestamps
        units = re.findall(r"bytes|seconds|size|time(?!out)", name)
        assert not units or name.endswith(("bytes", "seconds"))


@pytest.mark.parametrize("value", ['quo"te', "back\\slash", "new\nline", "\\n", "über", "\udcff"])
def test_labels_are_escaped_and_invalid_unicode_is_replaced(value: str) -> None:
    text = exposition(Stats(), Usage(0, 0), 1, {"directory": value, "backend": "file"})
    (about,) = parsed(text.encode().decode())["kcache_info"].samples
    assert about.labels == {"directory": value.replace("\udcff", "?"), "backend": "file"}
