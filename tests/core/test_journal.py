"""The journal: what is noted is found again, and nothing that happens to the file does harm."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kcache
from kcache.directory import open_directory
from kcache.engine.journal import EVENTS, LIMIT, Event, Journal

KEY = "0123456789abcdef" * 4


def journal(directory: Path, backend: str = "file", at: float = 1000.5) -> Journal:
    return Journal(str(directory), backend, clock=lambda: at)


def noted(directory: Path, backend: str = "file") -> list[Event]:
    return list(Journal(str(directory), backend).events())


def test_what_is_noted_is_found_by_the_next_process(tmp_path: Path) -> None:
    assert noted(tmp_path) == []
    journal(tmp_path).note("evicted", KEY)
    journal(tmp_path, at=1001).note("refused", KEY, "checksum mismatch")
    journal(tmp_path, at=1002).note("cleared")
    first, second, third = noted(tmp_path)
    assert first == Event(1000.5, "evicted", KEY[:32], "")
    assert second == Event(1001.0, "refused", KEY[:32], "checksum mismatch")
    assert third == Event(1002.0, "cleared", "", "")
    assert first.concerns(KEY)
    assert not first.concerns("f" + KEY[1:])
    assert not third.concerns(KEY)


@given(detail=st.text(), what=st.sampled_from(sorted(EVENTS)))
def test_no_detail_breaks_the_file(
    detail: str, what: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("journal")
    journal(directory).note(what, KEY, detail)
    journal(directory).note("evicted", KEY)
    first, second = noted(directory)
    assert (first.what, first.key) == (what, KEY[:32])
    assert len(first.detail) <= 10 * 200
    assert second.what == "evicted"


@settings(max_examples=15)
@given(content=st.binary(max_size=300))
def test_no_file_breaks_the_reader(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("journal")
    open_directory(str(directory))
    (directory / "journal").write_bytes(content)
    (directory / "journal.1").write_bytes(content[::-1])
    noted(directory)
    with open(directory / "journal", "ab") as file:
        file.write(b"\n")
    journal(directory).note("evicted", KEY)
    assert noted(directory)[-1] == Event(1000.5, "evicted", KEY[:32], "")


def test_it_is_bounded_and_remembers_the_last(tmp_path: Path) -> None:
    size = 0
    for number in range(6000):
        journal(tmp_path, at=number).note("evicted", KEY)
        size = max(size, sum(path.stat().st_size for path in tmp_path.glob("journal*")))
    assert size < 2 * LIMIT + 200
    assert {path.name for path in tmp_path.glob("journal*")} == {"journal", "journal.1"}
    times = [event.at for event in noted(tmp_path)]
    assert times == list(range(6000 - len(times), 6000))
    assert len(times) >= 1800


def test_the_engine_notes_what_it_refuses(tmp_path: Path) -> None:
    """What else leaves a cache: `cli/test_why.py`."""
    with kcache.KernelCache(tmp_path, memory_size=0) as cache:
        engine = cache.engine
        engine.put(KEY, kcache.Entry({"a": b"b"}))
        assert engine.get(KEY) is not None
        assert noted(tmp_path) == []
        engine.backend.put(KEY, b"damage")
        assert engine.get(KEY) is None
    (event,) = noted(tmp_path)
    assert (event.what, event.key) == ("refused", KEY[:32])
    assert "too short" in event.detail
