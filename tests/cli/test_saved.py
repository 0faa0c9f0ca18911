"""`kcache config --set`, and where commands look for the entries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.helpers import fill, kernel, key

import kcache


def saved(directory: Path) -> dict[str, str]:
    """Returns the settings that are saved in a cache's directory."""
    found: dict[str, str] = json.loads((directory / "kcache.json").read_text())["settings"]
    return found


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
    assert rows == [["max_size", "kcache.json", "5.0", "GiB"], ["wait", "kcache.json", "7.0"]]
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
    assert found["workers"]["source"] == "kcache.json"
    assert found["wait"]["source"] == "default"
    assert "saved" not in found["remote"]
    rows = [line.split() for line in here("config").out.splitlines()]
    assert ["workers", "kcache.json", "3"] in rows
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
    assert saved(cache_directory) == {}


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
    assert not cache_directory.exists() or saved(cache_directory) == {}


def test_a_foreign_directory_is_refused(here: Callable, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    said = here("config", "--set", "wait=3", "--directory", tmp_path / "photos")
    assert (said.code, said.out) == (2, "")
    assert "is no cache" in said.err
    assert [each.name for each in (tmp_path / "photos").iterdir()] == ["cat.jpg"]
    assert settings(here, "--directory", tmp_path / "photos")["wait"]["source"] == "default"


def test_what_can_not_be_used_is_a_warning_of_commands_and_a_problem_of_the_doctor(
    cache_directory: Path, here: Callable
) -> None:
    fill(cache_directory, {key(1): kernel()})
    marker = cache_directory / "kcache.json"
    marker.write_text(marker.read_text().replace("{}", '{"backend": "redis"}'))
    for command in ("info", "config"):
        done = here(command)
        assert done.code == 0
        assert done.err.count("kcache.json: backend='redis' is not known") == 1
    done = here("doctor", "--json")
    findings = [each for each in json.loads(done.out) if "kcache.json" in each["what"]]
    assert [(each["level"], each["topic"]) for each in findings] == [("problem", "cache")]
    assert here("config", "--set", "backend=file").code == 0
    assert "kcache.json" not in here("doctor").out


# -- where the entries are -------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["zstd", "lmdb", "zstd+lmdb"])
def test_after_a_migration_everything_looks_at_the_new_backend(
    target: str, cache_directory: Path, here: Callable
) -> None:
    fill(cache_directory, {key(n): kernel(names=[f"k{n}"]) for n in range(3)})
    said = here("migrate", "--to", target)
    assert f"\nSaved with the cache: backend={target}." in said.out
    about = json.loads(here("info", "--json").out)
    assert (about["backend"], about["backend_source"]) == (target, "kcache.json")
    assert about["entries"] == 3
    assert settings(here)["backend"]["source"] == "kcache.json"
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


@pytest.mark.parametrize("command", ["info", "ls", "stats", "trim", "verify", "report -o r.html"])
def test_a_variable_that_names_another_backend_is_one_warning(
    command: str, cache_directory: Path, here: Callable, tmp_path: Path
) -> None:
    fill(cache_directory, {key(1): kernel()})
    words = [word.replace("r.html", str(tmp_path / "r.html")) for word in command.split()]
    done = here(*words, KCACHE_BACKEND="zstd")
    assert done.code == 0
    told = "the backend zstd (KCACHE_BACKEND names it) is empty, and there is a folder of file. To"
    assert done.err.count(told) == 1


def test_the_doctor_tells_of_folders_that_are_not_in_use(
    cache_directory: Path, here: Callable
) -> None:
    fill(cache_directory, {key(1): kernel()})
    done = here("doctor", KCACHE_BACKEND="lmdb")
    assert done.code == 0
    told = "the backend lmdb (KCACHE_BACKEND names it) is empty, and there is a folder of file. To"
    assert told in done.out
    assert "\nwarning  backend " in done.out


def test_saving_another_backend_than_the_one_with_entries_is_a_warning(
    cache_directory: Path, here: Callable
) -> None:
    fill(cache_directory, {key(1): kernel()})
    said = here("config", "--set", "backend=zstd")
    assert said.code == 0
    assert "the backend zstd (kcache.json names it) is empty, and there is a folder of file" in (
        said.err
    )
    assert here("config", "--set", "backend=file").err == ""


def test_a_migration_tells_of_a_variable_that_comes_before(
    cache_directory: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCACHE_BACKEND", "file")
    fill(cache_directory, {key(1): kernel()})
    said = here("migrate", "--to", "zstd")
    assert said.code == 0
    assert "warning: KCACHE_BACKEND is set, and comes before the backend that is saved" in said.err
    assert here("migrate", "--to", "file").code == 0  # the entries come back
    assert saved(cache_directory) == {"backend": "file"}


def test_a_copy_saves_nothing(cache_directory: Path, here: Callable) -> None:
    fill(cache_directory, {key(1): kernel()})
    said = here("migrate", "--to", "zstd", "--keep")
    assert said.out.endswith("To use them: kcache config --set backend=zstd\n")
    assert saved(cache_directory) == {}


# -- kernels and manifests -------------------------------------------------------------------------


def test_a_backend_of_the_program_is_named_by_its_class(capsys: pytest.CaptureFixture[str]) -> None:
    from kcache.testing.memory import MemoryBackend

    with kcache.KernelCache(backend=MemoryBackend()) as cache:
        cache.print_info()
        assert "\nbackend               MemoryBackend\n" in capsys.readouterr().out
        assert "backend='MemoryBackend'" in repr(cache)
