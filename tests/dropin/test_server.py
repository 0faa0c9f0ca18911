"""The service for programs: which programs it serves."""

from pathlib import Path

import pytest

from kcache.dropin import run_environment as env

# -- the server of a program -----------------------------------------------------------------------


def test_relative_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, str]] = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        told.append(env.meaning({"KCACHE_DIR": "cache", "KCACHE_SIGNING_KEY_FILE": "key"}))
    assert told[0] != told[1]
    assert told[0] == env.meaning(
        {
            "KCACHE_DIR": str(tmp_path / "one" / "cache"),
            "KCACHE_SIGNING_KEY_FILE": str(tmp_path / "one" / "key"),
            "KCACHE_READ_ONLY": "",
        }
    )


def test_another_home_is_another_cache() -> None:
    one, other = env.meaning({"XDG_CACHE_HOME": "/a"}), env.meaning({"XDG_CACHE_HOME": "/b"})
    assert one != other
    named = {"KCACHE_DIR": "/c"}
    assert env.meaning({**named, "XDG_CACHE_HOME": "/a"}) == env.meaning(named)


def test_settings_show_no_token() -> None:
    one, other = (env.settings({"KCACHE_REMOTE_TOKEN": token}) for token in ("hidden", "other"))
    assert "hidden" not in str(one)
    assert one != other
