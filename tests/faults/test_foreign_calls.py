"""Every public call, in a program whose environment names a folder that is no cache."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

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


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


CACHE: dict[str, Callable[[KernelCache, Path], Any]] = {
    "get_or_compile": lambda c, out: c.get_or_compile(KERNEL, (), OPTIONS),
    "aget_or_compile": lambda c, out: asyncio.run(c.aget_or_compile(KERNEL, (), OPTIONS)),
    "compile_many": lambda c, out: c.compile_many([kcache.CompileRequest(KERNEL, (), OPTIONS)]),
    "lookup": lambda c, out: c.lookup(KERNEL, (), OPTIONS),
    "why": lambda c, out: c.why(KERNEL, (), OPTIONS),
    "record": lambda c, out: c.record(out / "record").__enter__(),
    "directory": lambda c, out: c.directory,
    "size_bytes": lambda c, out: c.size_bytes,
    "size_mb": lambda c, out: c.size_mb,
    "entry_count": lambda c, out: c.entry_count,
    "stats": lambda c, out: c.stats(),
    "total_stats": lambda c, out: c.total_stats(),
    "print_info": lambda c, out: c.print_info(io.StringIO()),
    "trim": lambda c, out: (c.trim(), c.trim(0), c.trim(older_than=0.0)),
    "clear_memory": lambda c, out: c.clear_memory(),
    "clear": lambda c, out: c.clear(),
    "close": lambda c, out: c.close(),
}
ENGINE: dict[str, Callable[[kcache.CacheEngine], Any]] = {
    "put": lambda e: e.put(key(1), entry()),
    "get": lambda e: e.get(key(1)),
    "get_or_create": lambda e: e.get_or_create(key(2), entry),
    "find": lambda e: e.find(key(1), again=True),
    "fetch": lambda e: e.fetch(key(3), again=True),
    "delete": lambda e: e.delete(key(1)),
    "refuse": lambda e: e.refuse(key(2), CorruptEntryError("damaged")),
    "report": lambda e: e.report("get", BackendError("no")),
    "flight": lambda e: e.flight.run(key(4), lambda: None, lambda: (entry(), None), lambda _: None),
    "journal": lambda e: e.journal and list(e.journal.events()),
    "note": lambda e: e.note("evicted", key(1)),
    "stats": lambda e: e.stats(),
    "total_stats": lambda e: e.total_stats(),
    "size_bytes": lambda e: e.size_bytes,
    "entry_count": lambda e: e.entry_count,
    "trim": lambda e: e.trim(0),
    "flush": lambda e: e.flush(),
    "after_fork": lambda e: e.after_fork(),
    "clear": lambda e: e.clear(),
    "close": lambda e: e.close(),
}


def test_no_call_is_forgotten() -> None:
    assert public(KernelCache) == set(CACHE)
    assert public(kcache.CacheEngine) == set(ENGINE)
    assert public(StatsFile) == {"SLOTS", "add", "total", "zero"}
    assert public(Journal) == {"events", "flush", "later", "note"}
    functions = {n for n in kcache.__all__ if type(getattr(kcache, n)) is type(public)}
    assert functions == {
        *("export_bundle", "import_bundle", "list_bundle", "verify_bundle"),  # below
        *("open_engine", "default_cache_directory", "compile_to_ptx"),  # below
        *(
            "compile",
            "hash_options",
            "hash_source",
            "include_paths",
            "install",
        ),  # look at no directory themselves
    }


@EACH
@pytest.mark.usefixtures("nvrtc")
def test_no_method_changes_the_folder_that_the_environment_names(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, long: bool
) -> None:
    before = snapshot(place)
    compiling = ("get_or_compile", "aget_or_compile", "compile_many")
    for backend in NAMES:
        with caplog.at_level(logging.WARNING), KernelCache(backend=backend) as cache:
            for name, call in CACHE.items():
                if long or backend == "file" or name not in compiling:
                    call(cache, tmp_path)
                    assert snapshot(place) == before, name
        with KernelCache(backend=backend) as cache:
            for name, use in ENGINE.items():
                use(cache.engine)
                assert snapshot(place) == before, name
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
