"""Public calls, in a program whose environment names a folder that is no cache."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from core.helpers import entry, key
from faults.places import NAMES
from faults.test_foreign_folders import (
    FOLDERS,
    KERNEL,
    links,
    namesakes,
    snapshot,
    special,
)

import kcache
from kcache import BackendError, CompileOptions, ConfigError, CorruptEntryError, KernelCache
from kcache.engine.journal import Journal
from kcache.engine.stats import FIELDS, StatsFile

OPTIONS = CompileOptions(arch="sm_80")
EACH = pytest.mark.parametrize("make", FOLDERS)


@pytest.fixture
def place(make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of somebody's, which the environment names."""
    place = tmp_path / "theirs"
    make(place)
    monkeypatch.setenv("KCACHE_DIR", str(place))
    return place


@EACH
def test_no_call_changes_the_folder_that_the_environment_names(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The cache works in memory alone, and says why."""
    before = snapshot(place)
    for backend in NAMES:
        with caplog.at_level(logging.WARNING), KernelCache(backend=backend) as cache:
            engine = cache.engine
            assert engine.get_or_create(key(1), entry) == entry()
            engine.put(key(2), entry())
            engine.delete(key(1))
            engine.refuse(key(2), CorruptEntryError("damaged"))
            engine.note("evicted", key(1))
            assert cache.lookup(KERNEL, (), OPTIONS) is None
            cache.print_info(io.StringIO())
            for call in (cache.total_stats, engine.flush, cache.trim, cache.clear):
                call()
            assert snapshot(place) == before
        assert snapshot(place) == before
    assert "allowed: a directory that is new or empty" in caplog.text


@EACH
def test_nothing_goes_to_the_folder_and_the_message_says_so(place: Path, tmp_path: Path) -> None:
    with KernelCache(tmp_path / "sound") as sound:
        assert sound.engine.put(key(1), entry())
        kcache.export_bundle(sound, tmp_path / "b.kcb")
    before = snapshot(place)
    assert kcache.list_bundle(tmp_path / "b.kcb") is not None
    kcache.verify_bundle(tmp_path / "b.kcb")
    assert kcache.default_cache_directory()
    with KernelCache() as cache:
        with pytest.raises(BackendError, match=r"nothing can be imported: .*allowed: a directory"):
            kcache.import_bundle(cache, tmp_path / "b.kcb")
        with pytest.raises(BackendError, match=r"nothing can be exported: .*allowed: a directory"):
            kcache.export_bundle(cache, tmp_path / "new.kcb")
    assert not (tmp_path / "new.kcb").exists()
    with suppress(ConfigError), KernelCache(tmp_path / "sound", remote=f"file://{place}") as cache:
        assert cache.lookup(KERNEL, (), OPTIONS) is None  # a layer, which is only read
    assert snapshot(place) == before


@pytest.mark.parametrize("make", [namesakes, links, special])
def test_statistics_and_a_journal_replace_no_file_of_another_program(place: Path) -> None:
    """They had the file renamed: what is damaged in a cache is somebody else's where there is none."""
    before = snapshot(place)
    for name in ("stats", "slots"):
        file = StatsFile(place / name)
        with pytest.raises(BackendError, match="no file of kcache|symbolic|such device"):
            file.add([1.0] * len(FIELDS))
        with pytest.raises(BackendError):
            file.zero()
        with suppress(BackendError):
            assert file.total() == kcache.Stats()
    journal = Journal(str(place), "file")
    journal.note("evicted", key(1))
    journal.later("evicted", key(1))
    journal.flush()
    assert list(journal.events()) == []
    assert snapshot(place) == before
