"""`kcache stats --prometheus`: parsed by Prometheus' own parser, and by its rules for collectors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.helpers import fill, kernel, key

import kcache
from kcache import Stats
from kcache.admin.info import exposition
from kcache.backend import Usage
from kcache.engine.stats import FIELDS

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is missing")


def parsed(text: str) -> dict[str, Any]:
    """Return family -> the family, as Prometheus' parser sees it."""
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
    families = parsed(said.out)  # of the counts before
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
            assert sample.timestamp is None  # a textfile collector refuses those
        units = re.findall(r"bytes|seconds|size|time(?!out)", name)
        assert not units or name.endswith(("bytes", "seconds"))


@pytest.mark.parametrize("value", ['quo"te', "back\\slash", "new\nline", "\\n", "über", "\udcff"])
def test_labels_are_escaped_and_what_is_no_unicode_is_replaced(value: str) -> None:
    text = exposition(Stats(), Usage(0, 0), 1, {"directory": value, "backend": "file"})
    (about,) = parsed(text.encode().decode())["kcache_info"].samples
    assert about.labels == {"directory": value.replace("\udcff", "?"), "backend": "file"}
