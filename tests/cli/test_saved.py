"""`kcache config --set`, and where commands look for the entries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.helpers import fill, kernel, key, manifest

import kcache
from kcache.engine.stats import Stats


def settings(here: Callable, *arguments: str | Path) -> dict[str, dict[str, object]]:
    said = here("config", "--json", *arguments)
    assert said.code == 0, said.err
    found: dict[str, dict[str, object]] = json.loads(said.out)["settings"]
    return found


def test_a_cap_is_saved_once_for_every_program(
    cache_directory: Path, here: Callable, run: Callable
) -> None:
    said = here("config", "--set", "max_size=5GiB", "--set", "wait = 7")
    assert (said.code, said.err) == (0, "")
    rows = [line.split() for line in said.out.splitlines()[1:]]
    assert rows == [["max_size", "settings.json", "5.0", "GiB"], ["wait", "settings.json", "7.0"]]
    with kcache.KernelCache() as cache:
        assert (cache.engine.max_size, cache.config.wait.value) == (5 << 30, 7.0)
    assert b"5.0 GiB" in run("info").stdout  # another process


def test_every_origin_is_shown(
    cache_directory: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    here("config", "--set", "max_size=5GiB", "--set", "workers=3")
    monkeypatch.setenv("KCACHE_MAX_SIZE", "2MiB")
    found = settings(here)
    assert found["max_size"] == {
        "value": 2 << 20,
        "source": "KCACHE_MAX_SIZE",
        "variable": "KCACHE_MAX_SIZE",
        "saved": "5GiB",
    }
    assert found["workers"]["source"] == "settings.json"
    assert found["wait"]["source"] == "default"
    assert "saved" not in found["remote"]
    rows = [line.split() for line in here("config").out.splitlines()]
    assert ["workers", "settings.json", "3"] in rows
    assert ["max_size", "KCACHE_MAX_SIZE", "2.0", "MiB"] in rows


def test_a_variable_that_comes_before_is_told(
    cache_directory: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCACHE_MAX_SIZE", "2MiB")
    said = here("config", "--set", "max_size=5GiB")
    assert said.code == 0
    assert "KCACHE_MAX_SIZE is set, and comes before the max_size that is saved" in said.err


def test_unset_forgets(cache_directory: Path, here: Callable) -> None:
    here("config", "--set", "max_size=5GiB", "--set", "wait=7")
    assert here("config", "--unset", "wait").out.split()[-3:] == ["wait", "default", "300.0"]
    assert settings(here)["max_size"]["saved"] == "5GiB"
    here("config", "--unset", "max_size")
    assert not (cache_directory / "settings.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--set", "max_size"), "write NAME=VALUE"),
        (("--set", "max_size=lots"), "max_size='lots' is not allowed; allowed:"),
        (("--set", "maxsize=1GiB"), "did you mean 'max_size'?"),
        (("--set", "directory=/x"), "'directory' can't be saved"),
        (("--set", "backend=redis"), "backend='redis' is not known; allowed: file"),
        (("--unset", "wat"), "'wat' can't be saved"),
        (("--set", "wait=3", "--unset", "wait"), "exclude each other: wait"),
    ],
)
def test_what_is_refused(
    arguments: tuple[str, ...], said: str, cache_directory: Path, here: Callable
) -> None:
    done = here("config", *arguments)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert not (cache_directory / "settings.json").exists()


def test_a_foreign_directory_is_refused(here: Callable, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    said = here("config", "--set", "wait=3", "--directory", tmp_path / "photos")
    assert (said.code, said.out) == (2, "")
    assert "is no cache" in said.err
    assert [each.name for each in (tmp_path / "photos").iterdir()] == ["cat.jpg"]
    assert settings(here, "--directory", tmp_path / "photos")["wait"]["source"] == "default"


def test_it_is_refused_where_nothing_may_be_written(
    cache_directory: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCACHE_READ_ONLY", "1")
    assert here("config", "--set", "wait=3").code == 2
    assert not cache_directory.exists()


def test_showing_makes_no_directory(cache_directory: Path, here: Callable) -> None:
    assert here("config").code == 0
    assert not cache_directory.exists()


def test_damage_is_a_warning_of_commands_and_a_problem_of_the_doctor(
    cache_directory: Path, run: Callable
) -> None:
    fill(cache_directory, {key(1): kernel()})
    (cache_directory / "settings.json").write_text("{")
    for command in ("info", "config"):
        done = run(command)
        assert done.returncode == 0
        assert done.stderr.count(b"settings.json can't be used: it is damaged") == 1
    done = run("doctor", "--json")
    findings = [each for each in json.loads(done.stdout) if "settings.json" in each["what"]]
    assert [(each["level"], each["topic"]) for each in findings] == [("problem", "settings")]
    assert run("config", "--set", "wait=3").returncode == 0
    assert (cache_directory / "settings.json.damaged").read_text() == "{"
    assert b"settings.json" not in run("doctor").stdout


def test_the_doctor_names_a_backend_that_is_gone(cache_directory: Path, run: Callable) -> None:
    fill(cache_directory, {key(1): kernel()})
    text = '{"format": "kcache-settings/1", "settings": {"backend": "redis"}}'
    (cache_directory / "settings.json").write_text(text)
    done = run("doctor")
    assert done.returncode == 1
    assert b"there is no backend 'redis'" in done.stdout


# -- where the entries are -------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["zstd", "lmdb", "zstd+lmdb"])
def test_after_a_migration_everything_looks_at_the_new_backend(
    target: str, cache_directory: Path, here: Callable
) -> None:
    fill(cache_directory, {key(n): kernel(names=[f"k{n}"]) for n in range(3)})
    said = here("migrate", "--to", target)
    assert f"\nSaved with the cache: backend={target}." in said.out
    about = json.loads(here("info", "--json").out)
    assert (about["backend"], about["backend_source"]) == (target, "settings.json")
    assert (about["entries"], about["elsewhere"]) == (3, [])
    assert settings(here)["backend"]["source"] == "settings.json"
    assert len(json.loads(here("ls", "--json").out)) == 3
    assert f'backend="{target}"' in here("stats", "--prometheus").out
    assert here("why", "--help").code == 0
    assert f"ok       backend          {target} " in here("doctor").out
    assert "3 entries read" in here("verify").out
    with kcache.KernelCache() as cache:
        assert (cache.config.backend.value, cache.entry_count) == (target, 3)
    assert here("rm", key(0)).code == 0
    assert here("trim", "--max-size", "0").out.startswith("evicted 2 entries")
    assert not (cache_directory / "file").exists()


def test_a_cache_that_an_earlier_version_moved_is_found(
    cache_directory: Path, here: Callable
) -> None:
    fill(cache_directory, {key(n): kernel() for n in range(3)}, "zstd")
    about = json.loads(here("info", "--json").out)
    assert (about["backend"], about["backend_source"]) == ("zstd", "its entries")
    assert settings(here)["backend"]["source"] == "its entries"
    assert here("migrate", "--to", "lmdb").out.startswith("moved 3 entries")


@pytest.mark.parametrize("command", ["info", "ls", "stats", "trim", "verify", "report -o r.html"])
def test_a_variable_that_names_another_backend_is_one_warning(
    command: str, cache_directory: Path, run: Callable, tmp_path: Path
) -> None:
    fill(cache_directory, {key(1): kernel()})
    words = [word.replace("r.html", str(tmp_path / "r.html")) for word in command.split()]
    done = run(*words, KCACHE_BACKEND="zstd")
    assert done.returncode == 0
    told = b"this directory's kernels are in the backend file (1 entry, "
    assert done.stderr.count(told) == 1
    assert b"and not in zstd (KCACHE_BACKEND names it)" in done.stderr
    assert b"set KCACHE_BACKEND=file" in done.stderr


def test_the_doctor_and_info_say_where_entries_are(cache_directory: Path, run: Callable) -> None:
    fill(cache_directory, {key(1): kernel()})
    done = run("doctor", KCACHE_BACKEND="lmdb")
    assert done.returncode == 0
    assert (
        b"warning  backend          this directory's kernels are in the backend file" in done.stdout
    )
    fill(cache_directory, {key(n): kernel() for n in range(2)}, "lmdb")
    assert (
        b"2 entries, 8.0 KiB more in the backend lmdb, which is not in use" in run("doctor").stdout
    )
    assert b"elsewhere             2 entries, 8.0 KiB in lmdb\n" in run("info").stdout
    about = json.loads(run("info", "--json").stdout)
    assert about["elsewhere"] == [{"name": "lmdb", "entries": 2, "bytes": 8192}]


def test_saving_another_backend_than_the_one_with_entries_is_a_warning(
    cache_directory: Path, here: Callable
) -> None:
    fill(cache_directory, {key(1): kernel()})
    said = here("config", "--set", "backend=zstd")
    assert said.code == 0
    assert "the kernels" not in said.out
    assert "kernels are in the backend file (1 entry" in said.err
    assert here("config", "--set", "backend=file").err == ""


def test_a_migration_tells_of_a_variable_that_comes_before(
    cache_directory: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCACHE_BACKEND", "file")
    fill(cache_directory, {key(1): kernel()})
    said = here("migrate", "--to", "zstd")
    assert said.code == 0
    assert "warning: KCACHE_BACKEND=file is set, and comes before that: unset it" in said.err
    assert here("migrate", "--to", "file").code == 0  # the entries come back
    assert json.loads((cache_directory / "settings.json").read_text())["settings"] == {
        "backend": "file"
    }


def test_a_copy_saves_nothing(cache_directory: Path, here: Callable) -> None:
    fill(cache_directory, {key(1): kernel()})
    said = here("migrate", "--to", "zstd", "--keep")
    assert said.out.endswith("To use them: kcache config --set backend=zstd\n")
    assert not (cache_directory / "settings.json").exists()


# -- kernels and manifests -------------------------------------------------------------------------


@pytest.mark.usefixtures("backend")
def test_info_counts_kernels_and_manifests_apart(
    cache_directory: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    name = os.environ["KCACHE_BACKEND"]
    entries = {key(n): kernel() for n in range(5)} | {key(f"m{n}"): manifest() for n in range(2)}
    fill(cache_directory, entries, name)
    about = json.loads(here("info", "--json").out)
    counts = {each: about[each] for each in ("entries", "kernels", "manifests", "others")}
    assert counts == {"entries": 7, "kernels": 5, "manifests": 2, "others": 0}
    assert about["entries_read"] == 7
    rows = dict(line.split(None, 1) for line in here("info").out.splitlines() if " " in line)
    assert (rows["entries"], rows["kernels"], rows["manifests"]) == ("7", "5", "2")
    assert "others" not in rows


def test_counting_many_entries_is_an_estimate_that_says_so(
    cache_directory: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kcache.admin import info

    monkeypatch.setattr(info, "_READ", 40)
    fill(
        cache_directory,
        {key(n): kernel(10) if n % 4 else manifest() for n in range(200)},
    )
    about = json.loads(here("info", "--json").out)
    assert (about["entries"], about["entries_read"]) == (200, 40)
    assert about["kernels"] + about["manifests"] + about["others"] == 200
    assert 100 <= about["kernels"] <= 190
    assert "(estimated from 40 entries)" in here("info").out


def test_info_as_json_has_the_counts(cache_directory: Path, here: Callable) -> None:
    fill(cache_directory, {key(1): kernel()})
    about = json.loads(here("info", "--json").out)
    assert about["directory"] == str(cache_directory)
    assert about["stats"].keys() == Stats().to_dict().keys()
    assert about["max_size"] == 1 << 30
    assert json.loads(here("info", "--json", "--directory", cache_directory / "no").out) == {
        "directory": str(cache_directory / "no"),
        "entries": 0,
        "size_bytes": 0,
    }


def test_a_backend_of_the_program_is_named_by_its_class(capsys: pytest.CaptureFixture[str]) -> None:
    from kcache.testing.memory import MemoryBackend

    with kcache.KernelCache(backend=MemoryBackend()) as cache:
        cache.print_info()
        assert "\nbackend               MemoryBackend\n" in capsys.readouterr().out
        assert "backend='MemoryBackend'" in repr(cache)
