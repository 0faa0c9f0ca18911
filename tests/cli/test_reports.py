"""`kcache info`, `stats`, `config` and `clear`, on a cache that is filled without a compiler."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import kcache
from kcache.config import VARIABLES

KEYS = [f"{n:02x}" * 32 for n in range(3)]


@pytest.fixture
def filled(cache_directory: Path) -> Path:
    """A cache with three entries, and one hit and two misses on its counts."""
    with kcache.open_engine(cache_directory) as engine:
        for key in KEYS:
            engine.put(key, kcache.Entry({"ptx": b"p" * 1000}, {}))
        engine.get(KEYS[0])
        engine.get("f" * 64)
        engine.get("e" * 64)
    return cache_directory


def lines(text: str) -> dict[str, str]:
    """Return name -> value of an aligned table."""
    pairs = (line.split("  ", 1) for line in text.splitlines() if "  " in line)
    return {name: value.strip() for name, value in pairs}


class TestInfo:
    def test_shows_the_place_the_size_and_the_counts_of_all_processes(
        self, filled: Path, here: Callable
    ) -> None:
        said = here("info")
        table = lines(said.out)
        assert (said.code, said.err) == (0, "")
        assert table["directory"] == str(filled)
        assert table["backend"] == "file"
        assert table["entries"] == "3"
        assert table["hits"].startswith("1 ")
        assert table["misses"] == "2"
        assert table["hit rate"] == "33.3%"
        assert {"size", "average compile time", "average cache time", "evictions"} <= table.keys()

    @pytest.mark.parametrize("command", ["info", "stats"])
    def test_a_mean_of_nothing_is_a_dash(
        self, command: str, cache_directory: Path, here: Callable
    ) -> None:
        with kcache.open_engine(cache_directory) as engine:
            engine.put(KEYS[0], kcache.Entry({"ptx": b"p"}, {}))
        table = lines(here(command).out)
        named = ("hit rate", "average compile time", "average cache time")
        assert [table[name] for name in named] == ["-", "-", "-"]
        assert table["compile time saved"] == "0 s"
        with kcache.open_engine(cache_directory) as engine:
            engine.get(KEYS[0])
        table = lines(here(command).out)
        assert table["hit rate"] == "100.0%"
        assert "-" not in table["average cache time"]
        assert table["average compile time"] == "-"

    def test_makes_no_directory(self, cache_directory: Path, here: Callable) -> None:
        said = here("info")
        assert said.code == 0
        assert str(cache_directory) in said.out
        assert not cache_directory.exists()

    def test_the_option_comes_before_the_variable(
        self, filled: Path, here: Callable, tmp_path: Path
    ) -> None:
        assert "nothing has been cached" in here("info", "--directory", tmp_path / "other").out

    def test_works_where_the_cache_is_read_only(
        self, filled: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KCACHE_READ_ONLY", "1")
        assert lines(here("info").out)["misses"] == "2"

    def test_a_file_in_the_place_of_the_directory_is_one_line(
        self, here: Callable, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")
        said = here("info", "--directory", tmp_path / "file")
        assert (said.code, said.out) == (2, "")
        assert said.err.startswith("kcache: error: directory=")
        assert said.err.count("\n") == 1


class TestStats:
    def test_shows_the_counts(self, filled: Path, here: Callable) -> None:
        assert lines(here("stats").out)["misses"] == "2"

    def test_json_is_one_object_with_every_field(self, filled: Path, here: Callable) -> None:
        said = here("stats", "--json")
        figures = json.loads(said.out)
        assert said.err == ""
        assert figures["hits"] == 1
        assert figures["misses"] == 2
        assert figures["puts"] == 3
        assert figures["entries"] == 3
        assert figures["size_bytes"] > 3000
        assert figures["directory"] == str(filled)
        assert figures.keys() >= kcache.Stats().to_dict().keys()

    def test_json_of_a_cache_that_is_not_there(self, cache_directory: Path, here: Callable) -> None:
        figures = json.loads(here("stats", "--json").out)
        assert (figures["hits"], figures["entries"]) == (0, 0)
        assert not cache_directory.exists()

    def test_zero_shows_the_counts_and_starts_again(self, filled: Path, here: Callable) -> None:
        said = here("stats", "--json", "--zero")
        assert json.loads(said.out)["hits"] == 1
        assert "zero" in said.err
        assert json.loads(here("stats", "--json").out)["hits"] == 0

    def test_zero_without_a_cache(self, cache_directory: Path, here: Callable) -> None:
        assert here("stats", "--zero").code == 0
        assert not cache_directory.exists()

    def test_zero_is_refused_where_the_cache_is_read_only(
        self, filled: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KCACHE_READ_ONLY", "1")
        said = here("stats", "--zero")
        assert (said.code, said.out) == (2, "")
        assert said.err.startswith("kcache: error: KCACHE_READ_ONLY is set")


class TestConfig:
    def test_every_setting_has_its_value_and_its_source(
        self, cache_directory: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KCACHE_MAX_SIZE", "2MiB")
        about = json.loads(here("config", "--json").out)
        settings = about["settings"]
        assert set(settings) == {variable.setting for variable in VARIABLES}
        assert settings["max_size"] == {
            "value": 2 << 20,
            "source": "KCACHE_MAX_SIZE",
            "variable": "KCACHE_MAX_SIZE",
            "saved": None,
        }
        assert settings["directory"]["value"] == str(cache_directory)
        assert settings["directory"]["source"] == "KCACHE_DIR"
        assert settings["read_only"]["source"] == "default"
        assert about["version"] == kcache.__version__

    def test_an_option_is_a_source(self, here: Callable, tmp_path: Path) -> None:
        about = json.loads(here("config", "--json", "--directory", tmp_path).out)
        assert about["settings"]["directory"]["source"] == "--directory"
        assert about["settings"]["directory"]["value"] == str(tmp_path)

    def test_the_default_directory_is_shown(
        self, here: Callable, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("KCACHE_DIR")
        about = json.loads(here("config", "--json").out)
        assert about["settings"]["directory"] == {
            "value": str(kcache.default_cache_directory()),
            "source": "default",
            "variable": "KCACHE_DIR",
        }

    @pytest.mark.usefixtures("nvrtc")
    def test_the_compiler_and_its_identity(self, here: Callable) -> None:
        compiler = json.loads(here("config", "--json").out)["compiler"]
        assert Path(compiler["path"]).is_file()
        assert compiler["identity"].startswith("nvrtc ")
        assert compiler["path"] in here("config").out
        assert compiler["identity"] in here("config").out

    def test_the_table_has_a_line_for_every_setting(
        self, here: Callable, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KCACHE_RECACHE", "yes")
        rows = [line.split() for line in here("config").out.splitlines()]
        assert ["recache", "KCACHE_RECACHE", "yes"] in rows
        assert ["max_size", "default", "1.0", "GiB"] in rows
        assert {variable.setting for variable in VARIABLES} <= {row[0] for row in rows if row}

    def test_a_bad_setting_is_one_line_that_names_it(
        self, here: Callable, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KCACHE_MAX_SIZE", "lots")
        said = here("config")
        assert (said.code, lines(said.out)["max_size"].split()) == (0, ["default", "1.0", "GiB"])
        assert said.err.startswith("kcache: warning: KCACHE_MAX_SIZE='lots' is not allowed")
        assert said.err.count("\n") == 1


class TestClear:
    def test_yes_deletes_every_entry_and_keeps_the_counts(
        self, filled: Path, here: Callable
    ) -> None:
        said = here("clear", "--yes")
        assert (said.code, said.err) == (0, "")
        assert said.out.startswith("deleted 3 entries")
        figures = json.loads(here("stats", "--json").out)
        assert (figures["entries"], figures["hits"]) == (0, 1)

    def test_without_anybody_to_ask_it_needs_yes(self, filled: Path, run: Callable) -> None:
        done = run("clear", stdin=b"y\n")
        assert done.returncode == 2
        assert b"--yes" in done.stderr
        with kcache.open_engine(filled) as engine:
            assert engine.entry_count == 3

    def test_without_a_cache(self, cache_directory: Path, here: Callable) -> None:
        assert here("clear", "--yes").code == 0
        assert not cache_directory.exists()

    def test_is_refused_where_the_cache_is_read_only(
        self, filled: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KCACHE_READ_ONLY", "1")
        assert here("clear", "--yes").code == 2
        with kcache.open_engine(filled) as engine:
            assert engine.entry_count == 3

    @pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may delete everything")
    def test_what_can_not_be_deleted_is_a_failure(self, filled: Path, here: Callable) -> None:
        shards = [path for path in filled.rglob("*") if path.is_dir()]
        for folder in shards:
            folder.chmod(0o500)
        try:
            said = here("clear", "--yes")
        finally:
            for folder in shards:
                folder.chmod(0o700)
        assert said.code == 1
        assert "kcache: error: 0 of 3 entries deleted" in said.err
