"""The contract's promises about what is not the backend's: files of the program, and of others."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

import pytest

from kcache.backend import Backend
from kcache.errors import BackendError
from kcache.testing._base import ContractBase, anything, as_threads, key, sealed
from kcache.testing._children import PATIENCE

__all__ = ["StrangerTests"]

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
        """A place that has somebody's files is refused by `BackendError`, and nothing changes."""
        if not (self.persistent and self.refuses_strangers):
            pytest.skip("it does not look whose a place is")
        (place / "photos").mkdir(parents=True)
        for name in ("notes", "counters", "lock", "photos/one"):
            (place / name).write_bytes(_THEIRS)
        before = self.snapshot(place)
        with suppress(BackendError), self.opened(place) as backend:
            for number in range(3):
                with pytest.raises(BackendError):
                    backend.put(key(number), b"value")
                with suppress(BackendError):
                    backend.delete(key(number))
            for listing in (backend.coldest, backend.scan):
                with suppress(BackendError):
                    list(listing())
            with suppress(BackendError):
                backend.usage()
            with suppress(BackendError):
                list(backend.check(repair=True))
        assert self.snapshot(place) == before

    def test_what_is_larger_than_the_cap_is_not_read(self, place: Path) -> None:
        """A value that grew on the medium beyond all bounds is `None` or a `BackendError`."""
        if not self.bounds_reads:
            pytest.skip("it reads whatever the medium holds")
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
