"""The contract's promises about trouble, and about files that are not the backend's."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from random import Random

import pytest

from kcache.backend import Backend
from kcache.errors import BackendError
from kcache.testing._base import PATIENCE, ContractBase, anything, as_threads, key, sealed
from kcache.testing.doubles import flipped, truncated


def _batch(backend: Backend) -> None:
    with backend.batch():
        backend.put(key(4), b"batch")


#: Every method of the contract.
EVERYTHING: dict[str, Callable[[Backend], object]] = {
    "get": lambda backend: backend.get(key(1)),
    "use": lambda backend: backend.use(key(1)),
    "put": lambda backend: backend.put(key(1), b"again"),
    "put another": lambda backend: backend.put(key("another"), b"x"),
    "delete": lambda backend: backend.delete(key(2)),
    "delete what is absent": lambda backend: backend.delete(key("absent")),
    "touch": lambda backend: backend.touch(key(3)),
    "usage": lambda backend: backend.usage(),
    "coldest": lambda backend: list(backend.coldest()),
    "scan": lambda backend: list(backend.scan()),
    "check": lambda backend: list(backend.check()),
    "repair": lambda backend: list(backend.check(repair=True)),
    "batch": _batch,
}
CHANGES = ("put", "put another", "delete", "delete what is absent", "touch", "repair", "batch")


class TroubleTests(ContractBase):
    """A failing operation raises only `BackendError`, and does no harm."""

    # -- read-only -------------------------------------------------------------------------------

    def test_reading_only_changes_nothing(self, place: Path) -> None:
        """Everything is found, and no method changes a thing.

        `put` raises `BackendError`, others may do nothing.
        """
        self.needs("persistent")
        with self.opened(place) as backend:
            names = self.fill(backend, 5)
        before = self.snapshot(place)
        assert before
        with self.opened(place, read_only=True) as backend:
            for infos in (backend.scan(), backend.coldest()):
                assert sorted(info.key for info in infos) == sorted(names)
            self.agree(backend, place)
            for name, act in EVERYTHING.items():
                with suppress(BackendError) if name in CHANGES else nullcontext():
                    act(backend)
            with pytest.raises(BackendError):
                backend.put(key(1), b"other")
            assert backend.get(key(1)) == sealed(key(1), 1, 100)
        assert self.snapshot(place) == before

    def test_reading_only_where_there_is_nothing(self, place: Path) -> None:
        """A place that does not exist reads as an empty one, and is not created."""
        self.needs("persistent")
        with self.opened(place, read_only=True) as backend:
            assert backend.get(key(1)) is None
            assert backend.use(key(1)) is None
            with suppress(BackendError):
                backend.touch(key(1))
            assert backend.usage() == (0, 0)
            assert list(backend.scan()) == list(backend.coldest()) == []
            assert list(backend.check()) == []
            with suppress(BackendError):
                backend.put(key(1), b"value")
            assert not place.exists()
            with self.opened(place) as writer:
                writer.put(key(1), b"value")
                if self.shared:
                    assert backend.get(key(1)) == b"value"

    # -- closed ----------------------------------------------------------------------------------

    def test_closing_one_handle_leaves_the_others(self, place: Path) -> None:
        """Handles of one process are independent of each other."""
        self.needs("shared")
        first, second = self.open(place), self.open(place)
        first.put(key(1), b"value")
        first.close()
        assert second.get(key(1)) == b"value"
        second.put(key(2), b"value")
        third = self.open(place)
        second.close()
        first.close()
        third.delete(key(1))
        self.agree(third, place, {key(2): b"value"})
        third.close()

    def test_a_closed_handle_raises_backend_errors_or_works(self, place: Path) -> None:
        """A method of a closed handle raises `BackendError` or gives the right result."""
        backend = self.open(place)
        self.fill(backend, 5)
        backend.close()
        for act in EVERYTHING.values():
            with suppress(BackendError):
                act(backend)
        with suppress(BackendError):
            assert backend.get(key(0)) == sealed(key(0), 0, 100)
        for _ in range(3):  # nothing to do
            backend.close()

    def test_an_iteration_outlives_its_place(self, place: Path) -> None:
        """If the handle is closed or the place removed, the iteration continues, ends or raises."""
        for listing in ("coldest", "scan"):
            for harm in ("close", "remove") if self.persistent else ("close",):
                with self.opened(place) as backend:
                    self.fill(backend, 60)
                    infos = getattr(backend, listing)()
                    next(infos)
                    if harm == "close":
                        backend.close()
                    else:
                        shutil.rmtree(place)
                    with suppress(BackendError):
                        assert len({info.key for info in infos}) < 60
                    del infos
        if self.persistent:
            with self.opened(place) as backend:
                backend.put(key("next"), b"next")
                self.agree(backend, place)

    def test_opening_many_times_leaks_nothing(self, place: Path) -> None:
        """Handles that are opened and closed leave no file open or behind."""
        with self.opened(place) as backend:
            backend.put(key(1), b"value")
        opened = len(_open_files(Path("/")))
        for number in range(30):
            read_only = number % 2 > 0
            with self.opened(place, read_only=read_only) as backend:
                backend.use(key(1))
                next(backend.coldest(), None)
                backend.usage()
                if not read_only:
                    backend.put(key(2), b"value")
        assert _open_files(place) == []
        assert len(_open_files(Path("/"))) <= opened
        assert list(self.leftovers(place)) == []

    # -- the medium is gone, or damaged ----------------------------------------------------------

    def test_a_place_that_is_removed_while_open(self, place: Path) -> None:
        """Each method works on nothing, or raises `BackendError`; then it works again."""
        self.needs("persistent")
        for act in EVERYTHING.values():
            with self.opened(place) as backend:
                self.fill(backend, 6)
                shutil.rmtree(place)
                with suppress(BackendError):
                    act(backend)
                if self.heals:
                    backend.put(key("next"), b"next")
                    assert backend.get(key("next")) == b"next"
                    self.not_below_the_truth(backend, place)
            shutil.rmtree(place, ignore_errors=True)

    def test_what_repair_mends_stays_mended(self, place: Path) -> None:
        """After damage, `check(repair=True)` leaves a place in which `check` finds nothing."""
        with self.opened(place) as backend:
            names = self.fill(backend, 6, size=3000)
            for name, damage in zip(
                names, (flipped(), flipped(1500), truncated(700), truncated(0)), strict=False
            ):
                self.write_raw(place, name, damage(self.read_raw(place, name)))
            for sentence in backend.check():
                assert isinstance(sentence, str)
                assert sentence
            list(backend.check(repair=True))
            assert list(backend.check()) == []
            self.agree(backend, place)
            assert backend.get(names[4]) == sealed(names[4], 4, 3000)


def _open_files(below: Path) -> list[str]:
    found: list[str] = []
    if os.path.isdir("/proc/self/fd"):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{number}")
                if target.startswith(str(below)):
                    found.append(target)
    return found


_THEIRS = b"a file of the program\n" * 500
_FILES = 40
_ROUNDS = 20
_CAP = 1 << 20
_NAMES = [key(number) for number in range(8)]


def _use(backend: Backend, begun: threading.Event, seed: int) -> None:
    random = Random(seed)
    with suppress(BackendError):
        for _ in range(80):
            anything(backend, random, _NAMES, 4000)
            begun.set()


def _close_and_open(backend: Backend, begun: threading.Event, paths: list[Path]) -> None:
    """Close a backend in use, and open other files, which get the numbers that are free then."""
    begun.wait(PATIENCE)
    backend.close()
    opened = [os.open(path, os.O_RDWR) for path in paths]
    for fd in opened:
        os.close(fd)


class StrangerTests(ContractBase):
    """A backend closes, reads, writes and deletes nothing but its own."""

    def test_closing_beside_use_touches_no_file_of_the_program(self, place: Path) -> None:
        """`close` while other threads put: they end, or get `BackendError`.

        A descriptor that was closed may be another file's a moment later; nothing is written there.
        """
        folder = place.parent / "theirs"
        folder.mkdir()
        paths = [folder / str(number) for number in range(_FILES)]
        for path in paths:
            path.write_bytes(_THEIRS)
        for turn in range(_ROUNDS if self.persistent else 1):
            backend, begun = self.open(place), threading.Event()
            users = [partial(_use, backend, begun, 3 * turn + number) for number in range(3)]
            as_threads(*users, partial(_close_and_open, backend, begun, paths))
        assert [path.name for path in paths if path.read_bytes() != _THEIRS] == []
        if self.persistent:
            with self.opened(place) as backend:
                self.sound(backend, _NAMES)
                self.not_below_the_truth(backend, place)

    def test_a_directory_of_others_is_left_alone(self, place: Path) -> None:
        """A place with other files is rejected by `BackendError`, and nothing changes."""
        self.needs("persistent", "refuses_strangers")
        (place / "photos").mkdir(parents=True)
        for name in ("notes", "counters", "lock", "photos/one"):
            (place / name).write_bytes(_THEIRS)
        before = self.snapshot(place)
        with suppress(BackendError), self.opened(place) as backend:
            for number, act in enumerate(EVERYTHING.values()):
                with pytest.raises(BackendError):
                    backend.put(key(number), b"value")
                with suppress(BackendError):
                    act(backend)
        assert self.snapshot(place) == before

    def test_what_is_larger_than_the_cap_is_not_read(self, place: Path) -> None:
        """A value that grew on the medium beyond all bounds is `None` or a `BackendError`."""
        self.needs("bounds_reads")
        with self.opened(place, max_size=_CAP) as backend:
            for name in (key(1), key(2)):
                backend.put(name, sealed(name, 1, 3000))
            self.write_raw(place, key(1), self.read_raw(place, key(1)) + bytes(40 * _CAP))
            for read in (backend.get, backend.use):
                with suppress(BackendError):
                    assert read(key(1)) is None
            assert backend.get(key(2)) == sealed(key(2), 1, 3000)
            backend.put(key(1), b"mended")
            assert backend.get(key(1)) == b"mended"
            self.not_below_the_truth(backend, place)
