"""What the service for programs knows: when it is ready, which programs it serves, what it counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kcache.dropin import environment as env
from kcache.dropin.answering import Answering, remember, standing
from kcache.dropin.programs import Counts, since
from kcache.kernel_cache import KernelCache
from kcache.nvrtc import library
from kcache.nvrtc.workers.pool import shared


def test_getting_ready_counts_nothing(nvrtc: tuple[int, int], tmp_path: Path) -> None:
    found = library.find()
    assert found is not None
    with KernelCache(tmp_path / "cache") as cache:
        answering = Answering(cache, str(tmp_path))
        workers = shared().pids()
        answering.warm_up()
        assert shared().pids() == workers  # most programs never compile
        remember(str(tmp_path), found.identity, (nvrtc, (75, 90)))
        answering.warm_up()
        assert answering.about(os.fsencode(found.path), standing()) == (nvrtc, (75, 90))
        stats = cache.stats()
        assert (stats.hits, stats.misses, stats.compiles, cache.entry_count) == (0, 0, 0, 0)


# -- which server serves whom ----------------------------------------------------------------------


def test_a_relative_directory_is_another_one_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# -- counts ----------------------------------------------------------------------------------------


def test_counts_of_one_run() -> None:
    counts = Counts()
    counts.answered(hit=False, failed=False)
    counts.handed("pch")
    counts.asked(os.getpid())
    before = counts.as_dict()
    counts.answered(hit=True, failed=False, saved=0.5)
    counts.handed("pch")
    counts.handed("optix-ir")
    told = since(before, counts.as_dict())
    assert (told["hits"], told["misses"], told["saved_seconds"]) == (1, 0, 0.5)
    assert (told["reasons"], told["names"]) == ({"pch": 1, "optix-ir": 1}, {})


def test_more_programs_than_names() -> None:
    counts = Counts()
    for process in range(10**9, 10**9 + 1000):  # beyond any that runs
        counts.asked(process)
        counts.asked(process)
    told = counts.as_dict()
    assert told["programs"] == 1000
    assert told["names"] == {"unknown": 1000}
