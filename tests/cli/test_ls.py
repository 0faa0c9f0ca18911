"""`kcache ls`: what is listed, in which order, and what must not stop it; and the filters of all."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.helpers import (
    age,
    damage,
    fill,
    held,
    kernel,
    key,
    manifest,
    recency,
    rows,
)

import kcache

A, B, C, M = (key(name) for name in "abcm")


@pytest.fixture
def filled(cache_directory: Path, backend: str) -> Path:
    """Three kernels and a manifest, in the order in which they were used."""
    now = time.time()
    fill(
        cache_directory,
        {
            A: kernel(20_000, created=now - 3 * 86400, seconds=2.0, names=["k<int>", "k<float>"]),
            B: kernel(40_000, created=now - 7200, seconds=0.05, source="b.cu", arch="sm_80"),
            M: manifest(),
            C: kernel(100, created=now - 60, seconds=0.5, source="c.cu", log="warning"),
        },
        backend,
    )
    return cache_directory


def listed(text: str) -> list[str]:
    """Return the first digits of the keys of a table."""
    head, *lines = text.splitlines()
    assert head.split() == ["KEY", "SIZE", "AGE", "USED", "COMPILE", "ARCH", "KERNEL"]
    return [line.split()[0] for line in lines]


def test_one_line_per_kernel_and_manifests_on_demand(
    filled: Path, here: Callable, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = recency(filled, backend)
    monkeypatch.setenv("KCACHE_READ_ONLY", "1")
    said = here("ls")
    assert (said.code, said.err) == (0, "")
    assert listed(said.out) == [C[:8], B[:8], A[:8]]
    assert re.fullmatch(
        rf"{A[:8]}  \d+\.\d KiB +3 d +\d+ s +2\.0 s +sm_90  axpy\.cu: k<int>, k<float>",
        said.out.splitlines()[3],
    )
    everything = here("ls", "--all").out
    assert listed(everything) == [C[:8], M[:8], B[:8], A[:8]]
    assert "(manifest)" in everything
    assert recency(filled, backend) == before  # listing is no use
    with kcache.KernelCache(filled) as cache:
        assert cache.total_stats().requests == 0


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("last-use", [C, B, A]),
        ("size", [B, A, C]),
        ("age", [C, B, A]),
        ("compile-time", [A, C, B]),
    ],
)
@pytest.mark.usefixtures("filled")
def test_the_orders_and_their_reverse(order: str, expected: list[str], here: Callable) -> None:
    for more, wanted in ((), expected), (("--reverse",), expected[::-1]):
        out = here("ls", "--sort", order, "--json", *more).out
        assert [row["key"] for row in rows(out)] == wanted


def test_json_has_full_keys_bytes_and_seconds(filled: Path, here: Callable, backend: str) -> None:
    before = recency(filled, backend)
    found = {row["key"]: row for row in rows(here("ls", "--all", "--json").out)}
    assert set(found) == {A, B, C, M}
    row = found[A]
    assert (row["kind"], row["problem"], row["arch"]) == ("kernel", None, "sm_90")
    assert (row["names"], row["compile_seconds"]) == (["k<int>", "k<float>"], 2.0)
    assert row["size_bytes"] > 20_000  # type: ignore[operator]
    assert row["last_use"] == pytest.approx(before[A] / 1e9)
    assert row["created"] == pytest.approx(time.time() - 3 * 86400, abs=300)
    assert (found[M]["kind"], found[M]["created"]) == ("manifest", None)


def test_a_damaged_entry_is_listed_as_such(filled: Path, here: Callable, backend: str) -> None:
    damage(filled, A, backend)
    said = here("ls", "--sort", "compile-time")
    assert (said.code, said.err) == (0, "")
    assert listed(said.out) == [C[:8], B[:8], A[:8]]
    assert "(damaged: " in said.out.splitlines()[3]
    assert here("ls", "--sort", "compile-time", "--reverse").out.splitlines()[3][:8] == A[:8]
    (row,) = [row for row in rows(here("ls", "--json").out) if row["key"] == A]
    assert row["kind"] == "damaged"
    assert row["problem"]


@pytest.mark.parametrize(
    "metadata",
    [
        {"functions": 5, "created": "yesterday", "compile_seconds": [], "arch": None},
        {"functions": [1, None], "created": 1e300, "compile_seconds": -1, "source_name": {}},
        {"created": -5, "source_name": "\x1b[31m\nred\r", "names": ["\u202e"], "arch": "\t"},
    ],
)
def test_metadata_may_say_anything(
    metadata: dict[str, object], cache_directory: Path, here: Callable
) -> None:
    fill(cache_directory, {A: kcache.Entry({}, {"kind": "kernel", **metadata})})  # type: ignore[dict-item]
    for order in ("last-use", "size", "age", "compile-time"):
        said = here("ls", "--sort", order)
        assert said.code == 0
        assert len(said.out.splitlines()) == 2
        assert all(char.isprintable() or char == "\n" for char in said.out)
    for command in (("ls", "--json"), ("show", A), ("show", A, "--json"), ("report", "-o", "-")):
        assert here(*command).code == 0


# -- the filters of all commands -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (["--name", "k<int>"], [A]),
        (["--name", "?.cu"], [B, C]),
        (["--name", "b.cu", "--name", "k<"], [A, B]),
        (["--arch", "80", "--arch", "sm_90"], [A, B, C]),
        (["--arch", "sm_80", "--name", "c.cu"], []),
        (["--older-than", "1h"], [B]),
        (["--used-within", "1h"], [A, C]),
    ],
)
def test_filters_mean_the_same_everywhere(
    filters: list[str], expected: list[str], cache_directory: Path, here: Callable, tmp_path: Path
) -> None:
    entries = {
        A: kernel(names=["k<int>"]),
        B: kernel(source="b.cu", arch="sm_80"),
        M: manifest(),
        C: kernel(source="c.cu"),
    }
    fill(cache_directory, entries)
    age(cache_directory, B, 7200)
    wanted = sorted(expected)
    for more in ([], ["--all"]):
        assert (
            sorted(row["key"] for row in rows(here("ls", *filters, *more, "--json").out)) == wanted
        )
    would = json.loads(here("rm", *filters, "--dry-run", "--json").out)
    assert (would["dry_run"], sorted(would["keys"])) == (True, wanted)
    bundle = tmp_path / "kernels.kcb"
    assert here("bundle", "export", *filters, "-o", bundle).code == 0
    listed = rows(here("bundle", "list", bundle, "--json").out)
    assert sorted(row["key"] for row in listed) == wanted
    assert sorted(held(cache_directory)) == sorted(entries)
    said = here("rm", *filters, "--yes")
    assert said.code == 0
    assert said.out.startswith(f"deleted {len(wanted)} entr")
    assert sorted(held(cache_directory)) == sorted(entries.keys() - wanted)


def test_filters_that_nothing_fits(cache_directory: Path, here: Callable) -> None:
    fill(cache_directory, {A: kernel()})
    assert here("ls", "--name", "nothing") == (0, "", "kcache: no kernel fits the filters\n")
    assert here("rm", "--name", "nothing", "--yes").out == "deleted 0 entries, 0 B\n"
    said = here("ls", "--older-than", "soon")
    assert said.code == 2
    assert 'such as "12h" or "30d"' in said.err
