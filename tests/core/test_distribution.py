"""Hints that install something: none names the distribution until it is on the package index."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from kcache._version import __version__
from kcache.util import distribution
from kcache.util.distribution import NAME, how_to_install

ROOT = Path(__file__).parents[2]
#: Files that mention the name but install nothing by it.
_TOLD = ("kcache/util/distribution.py",)


def installed_from(monkeypatch: pytest.MonkeyPatch, url: str | None) -> None:
    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if url is None else json.dumps({"url": url})

    def found(_: str) -> Any:
        return Distribution()

    monkeypatch.setattr(metadata, "distribution", found)


def test_a_hint_installs_from_where_kcache_was_installed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "a checkout"
    place.mkdir()
    installed_from(monkeypatch, place.as_uri())
    assert how_to_install("cu13,cli") == f"pip install '{place}[cu13,cli]'"


@pytest.mark.parametrize("url", [None, "file:///gone/for/ever", "https://example.org/kcache.git"])
def test_a_hint_names_a_checkout_or_a_wheel_where_that_is_not_known(
    url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_from(monkeypatch, url)
    assert how_to_install("cli") == (
        "pip install '.[cli]' in a checkout of kcache, "
        f"or pip install './kcache_cuda-{__version__}-py3-none-any.whl[cli]'"
    )


def _texts() -> list[Path]:
    folders = (ROOT / "kcache", ROOT / "backends", ROOT / "docs", ROOT / "examples")
    found = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    texts = [path for path in found if path.suffix in (".py", ".md", ".txt")]
    return [*texts, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.skipif(distribution.PUBLISHED, reason="it is published, so anybody may name it")
def test_nothing_installs_it_by_name() -> None:
    by_name = re.compile(rf"{NAME}\[|(pip|uv|pipx)\b[^\n`]*\binstall\b[^\n`]*\b{NAME}\b")
    for path in _texts():
        if "_build" in path.parts or path.relative_to(ROOT).as_posix() in _TOLD:
            continue
        found = by_name.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.relative_to(ROOT)}: {found and found[0]}"
