"""`kcache trim`, `rm` and `clear`: what goes, what stays, and that a rehearsal changes nothing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.helpers import (
    NOBODY,
    age,
    as_nobody,
    can_become_nobody,
    damage,
    fill,
    held,
    kernel,
    key,
    manifest,
    nobodys_directory,
    recency,
)

import kcache

DAY = 86400.0


def filled(directory: Path, backend: str = "file", count: int = 10) -> list[str]:
    """Fill a cache with equal entries; return their keys, least recently used first."""
    names = [key(n) for n in range(count)]
    fill(directory, {name: kernel(10_000) for name in names}, backend)
    return names


def counts(text: str) -> int:
    """Return how many entries a message says went."""
    found = re.fullmatch(r"(?:would evict|evicted) ([\d,]+) entr(?:y|ies), \d.*\n", text)
    assert found, text
    return int(found[1].replace(",", ""))


# -- trim ------------------------------------------------------------------------------------------


def test_the_least_recently_used_go(cache_directory: Path, here: Callable, backend: str) -> None:
    names = filled(cache_directory, backend)
    with kcache.KernelCache(cache_directory) as cache:
        goal = cache.size_bytes // 2
        cache.engine.get(names[0])
    said = here("trim", "--max-size", goal)
    assert (said.code, said.err) == (0, "")
    assert counts(said.out) == 5
    assert held(cache_directory, backend) == [*names[6:], names[0]]


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


def test_what_was_not_used_for_so_long_goes(cache_directory: Path, here: Callable) -> None:
    names = filled(cache_directory)
    for name in names[:3]:
        age(cache_directory, name, 31 * DAY)
    for name in names[3:5]:
        age(cache_directory, name, 29 * DAY)
    assert counts(here("trim", "--older-than", "30d", "--dry-run").out) == 3
    assert counts(here("trim", "--older-than", "30d").out) == 3
    assert counts(here("trim", "--older-than", "4w").out) == 2
    assert held(cache_directory) == names[5:]


def test_age_and_size_together(cache_directory: Path, here: Callable) -> None:
    names = filled(cache_directory)
    with kcache.KernelCache(cache_directory) as cache:
        one = cache.size_bytes // 10
    for name in names[:3]:
        age(cache_directory, name, 40 * DAY)
    options = ("--older-than", "30d", "--max-size", 8 * one + 1)
    assert counts(here("trim", *options, "-n").out) == 3
    assert counts(here("trim", *options).out) == 3
    options = ("--older-than", "30d", "--max-size", 5 * one)
    assert counts(here("trim", *options, "-n").out) == 2
    assert counts(here("trim", *options).out) == 2
    assert held(cache_directory) == names[5:]


def test_a_rehearsal_changes_nothing(cache_directory: Path, here: Callable, backend: str) -> None:
    filled(cache_directory, backend)
    damage(cache_directory, key(3), backend)
    before = recency(cache_directory, backend)
    files = {path: path.stat().st_mtime_ns for path in (cache_directory / backend).rglob("*")}
    said = here("trim", "--dry-run", "--max-size", "0")
    assert said.code == 0
    assert said.out.startswith("would evict 10 entries, ")
    assert recency(cache_directory, backend) == before
    if "lmdb" not in backend:
        assert files == {p: p.stat().st_mtime_ns for p in (cache_directory / backend).rglob("*")}
    assert here("trim", "--max-size", "0").out == said.out.replace("would evict", "evicted")


def test_a_rehearsal_in_a_large_cache_is_exact_in_bytes(
    cache_directory: Path, here: Callable
) -> None:
    fill(cache_directory, {key(n): kernel(10) for n in range(3000)})
    with kcache.KernelCache(cache_directory) as cache:
        goal = cache.size_bytes // 3
    rehearsed = here("trim", "-n", "--max-size", goal)
    assert abs(counts(here("trim", "--max-size", goal).out) - counts(rehearsed.out)) <= 1


def test_a_rehearsal_works_where_nothing_may_be_written(
    cache_directory: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = filled(cache_directory)
    monkeypatch.setenv("KCACHE_READ_ONLY", "1")
    assert counts(here("trim", "-n", "--max-size", "1").out) == 10
    said = here("trim", "--max-size", "1")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("kcache: error: KCACHE_READ_ONLY is set: trim would write")
    assert held(cache_directory) == names


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--max-size", "lots"), "--max-size='lots'"),
        (("--max-size", "-1"), "--max-size='-1'"),
        (("--older-than", "soon"), "--older-than='soon'"),
        (("--older-than", "30"), "--older-than='30'"),
        (("--older-than=-3d",), "--older-than='-3d'"),
    ],
)
def test_what_is_no_size_or_age_is_one_line(
    options: tuple[str, ...], names: str, cache_directory: Path, here: Callable
) -> None:
    before = filled(cache_directory, count=2)
    said = here("trim", *options)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"kcache: error: {names} is not allowed")
    assert said.err.count("\n") == 1
    assert held(cache_directory) == before


def test_trim_without_a_cache(cache_directory: Path, here: Callable) -> None:
    for options in ((), ("--dry-run",)):
        said = here("trim", *options)
        assert (said.code, said.out) == (
            0,
            "nothing to evict: nothing has been cached yet\n",
        )
    assert not cache_directory.exists()


def test_evictions_by_hand_are_counted(cache_directory: Path, here: Callable) -> None:
    filled(cache_directory, count=3)
    here("trim", "--max-size", "0")
    with kcache.KernelCache(cache_directory) as cache:
        assert cache.total_stats().evictions == 3


@pytest.mark.skipif(not can_become_nobody(), reason="another user is needed to have no rights")
def test_what_may_not_be_evicted_is_a_failure(
    here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nobodys_directory() as directory:
        monkeypatch.setenv("KCACHE_DIR", str(directory))
        os.chown(directory, os.geteuid(), -1)
        filled(directory, count=3)
        here("rm", key(2))
        for path in (directory, *directory.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        folder = directory / "file" / key(0)[:2]
        folder.chmod(0o500)
        code, out, err = as_nobody("trim", "--max-size", "0")
        assert (code, out) == (1, "")
        assert err.splitlines()[-1].startswith("kcache: error: only 1 entry evicted")
        code, out, err = as_nobody("rm", key(0))
        assert (code, out) == (1, "")
        assert err.startswith("kcache: error: delete ")
        assert "Permission denied" in err
        folder.chmod(0o700)


# -- rm --------------------------------------------------------------------------------------------


def test_single_entries_are_deleted(cache_directory: Path, here: Callable, backend: str) -> None:
    names = filled(cache_directory, backend, 5)
    damage(cache_directory, names[1], backend)
    said = here("rm", names[0][:6], names[1], "--yes")
    assert (said.code, said.err) == (0, "")
    assert re.fullmatch(r"deleted 2 entries, \d.*\n", said.out)
    assert set(held(cache_directory, backend)) == set(names[2:])
    with kcache.KernelCache(cache_directory) as cache:
        assert cache.entry_count == 3


def test_a_key_that_is_named_twice_is_one(cache_directory: Path, here: Callable) -> None:
    names = filled(cache_directory, count=2)
    said = here("rm", names[0], names[0], names[0][:8], names[0][:9].upper())
    assert said.code == 0
    assert said.out.startswith("deleted 1 entry, ")


def test_nothing_is_deleted_if_one_key_is_unknown_or_ambiguous(
    cache_directory: Path, here: Callable
) -> None:
    names = [key(n, "abcd") for n in range(2)]
    fill(cache_directory, {name: kernel(10) for name in (*names, key(9))})
    assert here("rm", key(9), "00000000").code == 1
    assert here("rm", key(9), "abcd").code == 1
    assert len(held(cache_directory)) == 3


def test_rm_needs_a_key_and_asks_nothing(cache_directory: Path, run: Callable) -> None:
    names = filled(cache_directory, count=1)
    assert run("rm").returncode == 2
    done = run("rm", names[0])
    assert (done.returncode, done.stderr) == (0, b"")
    assert held(cache_directory) == []


@pytest.mark.parametrize("variable", ["KCACHE_READ_ONLY", "KCACHE_DISABLE"])
def test_rm_is_refused_where_the_cache_is_not_to_be_written(
    variable: str, cache_directory: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = filled(cache_directory, count=1)
    monkeypatch.setenv(variable, "1")
    said = here("rm", names[0])
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"kcache: error: {variable} is set")
    assert held(cache_directory) == names


def test_an_entry_that_goes_meanwhile_is_no_failure(
    cache_directory: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kcache.cli.commands import rm

    names = filled(cache_directory, count=2)
    resolve = rm.resolve

    def resolve_late(*arguments: object) -> object:
        found = resolve(*arguments)  # type: ignore[arg-type]
        with kcache.KernelCache(cache_directory) as cache:
            cache.engine.delete(names[0])
        return found

    monkeypatch.setattr(rm, "resolve", resolve_late)
    said = here("rm", *names)
    assert said.code == 0
    assert said.err == f"kcache: {names[0][:12]} was deleted meanwhile\n"
    assert said.out.startswith("deleted 1 entry, ")


# -- every backend ---------------------------------------------------------------------------------


def test_the_older_commands_work_with_every_backend(
    cache_directory: Path, here: Callable, backend: str
) -> None:
    filled(cache_directory, backend, 3)
    info = here("info")
    assert (info.code, info.err) == (0, "")
    assert re.search(rf"^backend +{re.escape(backend)}$", info.out, re.M)
    assert re.search(r"^entries +3$", info.out, re.M)
    cleared = here("clear", "--yes")
    assert cleared.code == 0
    assert cleared.out.startswith("deleted 3 entries, ")
    assert held(cache_directory, backend) == []


@pytest.mark.usefixtures("nvrtc")
def test_compile_works_with_every_backend(work: Path, here: Callable, backend: str) -> None:
    for outcome in ("compiled in", "hit in"):
        said = here("compile", "axpy.cu", "--arch", "sm_90", "--name", "axpy<float>")
        assert said.code == 0, said.err
        assert said.err.startswith(f"kcache: {outcome}")


# -- rm by filters, and JSON -----------------------------------------------------------------------


def test_rm_by_filters(cache_directory: Path, here: Callable) -> None:
    one, two, three = key(1), key(2), key(3)
    fill(
        cache_directory,
        {one: kernel(arch="sm_80"), two: kernel(source="b.cu"), three: manifest()},
    )
    said = json.loads(here("rm", "--arch", "sm_80", "--dry-run", "--json").out)
    assert (said["dry_run"], said["keys"], said["entries"]) == (True, [one], 1)
    assert set(held(cache_directory)) == {one, two, three}
    assert here("rm", "--arch", "sm_80").out.startswith("deleted 1 entry, ")
    assert set(held(cache_directory)) == {two, three}
    assert here("rm", "--name", "nothing").out == "deleted 0 entries, 0 B\n"
    assert here("rm", "--name", "b.cu", two).code == 2
    assert set(held(cache_directory)) == {two, three}


def test_what_they_say_as_json(cache_directory: Path, here: Callable) -> None:
    for command in (("trim",), ("clear", "--yes")):
        assert json.loads(here(*command, "--json").out)["entries"] == 0  # no cache yet
    fill(cache_directory, {key(n): kernel() for n in range(4)})
    said = json.loads(here("trim", "--max-size", "0", "--dry-run", "--json").out)
    assert (said["dry_run"], said["entries"]) == (True, 4)
    assert said["size_bytes"] > 4000
    assert json.loads(here("rm", key(1), "--json").out)["keys"] == [key(1)]
    assert json.loads(here("clear", "--yes", "--json").out)["entries"] == 3
