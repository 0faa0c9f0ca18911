"""`kcache config`: every setting, its value and its source; what is saved: test_saved.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import kcache
from kcache.config import VARIABLES


def test_every_setting_has_its_value_and_its_source(
    cache_directory: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
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


def test_an_option_is_a_source(here: Callable, tmp_path: Path) -> None:
    about = json.loads(here("config", "--json", "--directory", tmp_path).out)
    assert about["settings"]["directory"]["source"] == "--directory"
    assert about["settings"]["directory"]["value"] == str(tmp_path)


def test_the_default_directory_is_shown(here: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KCACHE_DIR")
    about = json.loads(here("config", "--json").out)
    assert about["settings"]["directory"] == {
        "value": str(kcache.default_cache_directory()),
        "source": "default",
        "variable": "KCACHE_DIR",
    }


@pytest.mark.usefixtures("nvrtc")
def test_the_compiler_and_its_identity(here: Callable) -> None:
    compiler = json.loads(here("config", "--json").out)["compiler"]
    assert Path(compiler["path"]).is_file()
    assert compiler["identity"].startswith("nvrtc ")
    assert compiler["path"] in here("config").out
    assert compiler["identity"] in here("config").out


def test_the_table_has_a_line_for_every_setting(
    here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCACHE_RECACHE", "yes")
    rows = [line.split() for line in here("config").out.splitlines()]
    assert ["recache", "KCACHE_RECACHE", "yes"] in rows
    assert ["max_size", "default", "1.0", "GiB"] in rows
    assert {variable.setting for variable in VARIABLES} <= {row[0] for row in rows if row}


def test_a_bad_setting_is_one_line_that_names_it(
    here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCACHE_MAX_SIZE", "lots")
    said = here("config")
    assert (said.code, re.search(r"^max_size +default +1.0 GiB$", said.out, re.M) is None) == (
        0,
        False,
    )
    assert said.err.startswith("kcache: warning: KCACHE_MAX_SIZE='lots' is not allowed")
    assert said.err.count("\n") == 1
