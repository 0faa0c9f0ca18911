"""`kcache trim`, `rm` and `clear` remove the right entries, and nothing with `--dry-run`."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.helpers import age, damage, fill, held, kernel, manifest
from core.helpers import key, snapshot

import kcache

DAY = 86400.0


def filled(directory: Path, backend: str = "file", count: int = 10) -> list[str]:
    """Fill a cache with equal entries; return their keys, least recently used first."""
    names = [key(n) for n in range(count)]
    fill(directory, {name: kernel(10_000) for name in names}, backend)
    return names


def counts(text: str) -> int:
    """Return the number of evicted entries in a message."""
    found = re.fullmatch(r"(?:would evict|evicted) ([\d,]+) entr(?:y|ies), \d.*\n", text)
    assert found, text
    return int(found[1].replace(",", ""))


# -- trim ------------------------------------------------------------------------------------------


def test_the_least_recently_used_go(cache_directory: Path, here: Callable, backend: str) -> None:
    names = filled(cache_directory, backend)
    with kcache.KernelCache(cache_directory) as cache:
        goal = cache.size_bytes // 2
        cache.engine.get(names[0])
    out = here("trim", "--max-size", goal).clean()
    assert counts(out) == 5
    assert held(cache_directory, backend) == [*names[6:], names[0]]
    with kcache.KernelCache(cache_directory) as cache:
        assert cache.total_stats().evictions == 5


def test_without_options_to_nine_tenths_of_the_cap(
    cache_directory: Path, here: Callable, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = filled(cache_directory, backend)
    with kcache.KernelCache(cache_directory) as cache:
        size = cache.size_bytes
    monkeypatch.setenv("KCACHE_MAX_SIZE", str(size))
    rehearsed = here("trim", "--dry-run")
    said = here("trim")
    assert counts(said.out) == counts(rehearsed.out) == 1
    assert held(cache_directory, backend) == names[1:]
    assert counts(here("trim").out) == 0


def test_age_and_size_together(cache_directory: Path, here: Callable) -> None:
    names = filled(cache_directory)
    with kcache.KernelCache(cache_directory) as cache:
        one = cache.size_bytes // 10
    for name in names[:3]:
        age(cache_directory, name, 40 * DAY)
    for options, count in (
        (("--older-than", "41d"), 0),
        (("--older-than", "30d", "--max-size", 8 * one + 1), 3),
        (("--older-than", "30d", "--max-size", 5 * one), 2),
    ):
        assert counts(here("trim", *options, "-n").out) == count
        assert counts(here("trim", *options).out) == count
    assert held(cache_directory) == names[5:]


@pytest.mark.parametrize("command", ["trim --max-size 0", f"rm {key(5)}", "migrate --to zstd"])
def test_a_rehearsal_changes_nothing(
    command: str, cache_directory: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(cache_directory)
    damage(cache_directory, key(3))
    before = snapshot(cache_directory)
    monkeypatch.setenv("KCACHE_READ_ONLY", "1")
    rehearsed = here(*command.split(), "--dry-run").clean()
    assert snapshot(cache_directory) == before
    monkeypatch.delenv("KCACHE_READ_ONLY")
    done = here(*command.split()).out.splitlines()[0]
    verb, count = re.match(r"would (\w+) (\d+) entr", rehearsed).groups()
    damaged = command.startswith("migrate")  # the damaged entry is left out
    assert re.match(rf"{verb}e?d (\d+) ", done)[1] == str(int(count) - damaged)


# -- rm --------------------------------------------------------------------------------------------


def test_single_entries_are_deleted(cache_directory: Path, here: Callable, backend: str) -> None:
    names = filled(cache_directory, backend, 5)
    damage(cache_directory, names[1], backend)
    out = here("rm", names[0][:6], names[1], names[0], names[0][:9].upper(), "--yes").clean()
    assert re.fullmatch(r"deleted 2 entries, \d.*\n", out)
    assert set(held(cache_directory, backend)) == set(names[2:])
    with kcache.KernelCache(cache_directory) as cache:
        assert cache.entry_count == 3
    told = json.loads(here("rm", names[2], "--json").out)
    assert (told["dry_run"], told["entries"], told["keys"]) == (False, 1, [names[2]])
    assert told["size_bytes"] > 1000


def test_rm_needs_known_keys(cache_directory: Path, here: Callable) -> None:
    fill(cache_directory, {key(9): kernel(10)})
    assert here("rm", key(9), "00000000").code == 1
    for arguments in ([], [key(9), "--name", "axpy"]):
        said = here("rm", *arguments)
        assert said.code == 2
        assert "Expected either keys or filter options" in said.err
    assert len(held(cache_directory)) == 1


# -- clear -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--max-size=lots", "--older-than=soon"])
def test_bad_sizes_and_ages(option: str, cache_directory: Path, here: Callable) -> None:
    before = filled(cache_directory, count=2)
    said = here("trim", option)
    name, _, value = option.partition("=")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"kcache: error: {name}: expected ")
    assert held(cache_directory) == before


def test_clear_keeps_the_counts(cache_directory: Path, here: Callable, backend: str) -> None:
    fill(cache_directory, {key(1): kernel(), key(2): manifest(), key(3): kernel()}, backend)
    out = here("clear", "--yes").clean()
    # `ls` and `stats` count in the same way.
    assert out.startswith("deleted 3 entries (2 kernels, 1 manifest), ")
    figures = json.loads(here("stats", "--json").out)
    assert (figures["entries"], figures["puts"]) == (0, 3)
    assert held(cache_directory, backend) == []
    fill(cache_directory, {key(1): kernel()}, backend)
    told = json.loads(here("clear", "--yes", "--json").out)
    assert (told["entries"], told["kernels"], told["manifests"]) == (1, 1, 0)
