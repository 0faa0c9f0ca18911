"""Engine and file backend against plain models, under random operations and random harm."""

import os
import shutil
from pathlib import Path

import pytest
from backends.suites import FileSuite
from core.helpers import LONG, QUICK, look, path_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from kcache import CacheEngine, open_engine
from kcache.testing import CacheMachine

FEW = settings(QUICK, max_examples=10, stateful_step_count=40)
MANY = settings(LONG, max_examples=150, stateful_step_count=60)


class Files(FileSuite):
    """The files of a backend at the place itself."""

    def look(self, place: Path) -> dict[str, int]:
        tree = look(place)
        assert tree.temporary == []
        return tree.entries


class FilesOfACache(Files):
    """Those of a cache, in its own folder there."""

    def look(self, place: Path) -> dict[str, int]:
        return super().look(place / "file")

    def read_raw(self, place: Path, key: str) -> bytes:
        return super().read_raw(place / "file", key)

    def write_raw(self, place: Path, key: str, image: bytes) -> None:
        super().write_raw(place / "file", key, image)


class ExactFiles(CacheMachine):
    """Nobody else touches the directory."""

    def __init__(self) -> None:
        super().__init__(Files())


class HarmedFiles(CacheMachine):
    """Files are damaged and removed by others, those of the backend itself and the statistics."""

    exact = False

    def __init__(self) -> None:
        super().__init__(FilesOfACache())

    def make_engine(self) -> CacheEngine:
        return open_engine(self.place, max_size=self.cap, memory_size=self.memory_size)

    @property
    def files(self) -> Path:
        return self.place / "file"

    @property
    def has_counters(self) -> bool:
        return (self.files / "counters").exists()

    @rule(number=st.integers(0, 100))
    def remove_a_file(self, number: int) -> None:
        name = self.one_of(number)
        if name:
            path_of(self.files, name).unlink()

    @rule(number=st.integers(0, 100))
    def remove_a_shard(self, number: int) -> None:
        name = self.one_of(number)
        if name:
            shutil.rmtree(path_of(self.files, name).parent)

    @precondition(lambda self: self.has_counters)
    @rule(junk=st.binary(max_size=64), offset=st.integers(0, 8192))
    def damage_the_counters(self, junk: bytes, offset: int) -> None:
        with (self.files / "counters").open("r+b") as file:
            file.seek(offset)
            file.write(junk)

    @precondition(lambda self: self.has_counters)
    @rule(length=st.integers(0, 8191))
    def truncate_the_counters(self, length: int) -> None:
        os.truncate(self.files / "counters", length)

    @rule()
    def remove_the_counters(self) -> None:
        (self.files / "counters").unlink(missing_ok=True)

    @rule()
    def damage_the_statistics(self) -> None:
        if (self.place / "stats").exists():
            (self.place / "stats").write_bytes(os.urandom(1000))

    @invariant()
    def nothing_failed(self) -> None:
        """Not even where everything was removed."""
        assert self.engine.stats().errors == 0


@pytest.mark.parametrize("machine", [ExactFiles, HarmedFiles])
def test_a_cache_behaves_as_its_model(machine: type[ExactFiles | HarmedFiles], long: bool) -> None:
    run_state_machine_as_test(machine, settings=MANY if long else FEW)
