"""BackendContract: a pytest suite that tests what every backend promises.

```python
from kcache.testing import BackendContract


class TestMyBackend(BackendContract):
    def open(self, place, *, max_size=1 << 26, read_only=False, clock=None):
        return MyBackend(place, max_size=max_size, read_only=read_only, clock=clock or time_ns)

    def look(self, place):
        return {path.name: path.stat().st_size for path in place.glob("*")}
```
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path

import hypothesis
import pytest
from hypothesis.stateful import (
    run_state_machine_as_test,  # pyright: ignore[reportUnknownVariableType]
)

from kcache.backend import Backend
from kcache.errors import BackendError
from kcache.testing._base import key, run_forked, sealed, work_of
from kcache.testing._processes import ProcessTests
from kcache.testing.doubles import flipped, truncated
from kcache.testing.machine import DEFAULTS, BackendMachine

#: More entries than `coldest` may examine at its start.
_LARGE = 3_000
_CAP = 1 << 20
_THEIRS = b"a file of the program\n" * 500


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


def _open_files(below: Path) -> list[str]:
    found: list[str] = []
    if os.path.isdir("/proc/self/fd"):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{number}")
                if target.startswith(str(below)):
                    found.append(target)
    return found


class BackendContract(ProcessTests):
    """Subclass it in a test module, supply `open` and `look`, and pytest tests every promise.

    Each test checks one promise, which its docstring states. The tests compare the answers of the
    backend with `look` and the other hooks. These read the medium itself, so the backend can't
    confirm its own mistakes. A correct backend passes in well under a minute. A test that hangs is
    ended after a minute.

    If the system can fork, the tests fork and kill processes.

    Attributes:
        machine_settings: Hypothesis's settings for `BackendMachine`, or None for `DEFAULTS`.
    """

    machine_settings: hypothesis.settings | None = None

    # -- values, sizes and recency -----------------------------------------------------------------

    def test_it_behaves_as_its_model(self) -> None:
        """After any operations, values, sizes and recency are those of a model, which is a dict."""
        suite = self

        class Machine(BackendMachine):
            def __init__(self) -> None:
                super().__init__(suite)

        run_state_machine_as_test(Machine, settings=self.machine_settings or DEFAULTS)

    def test_usage_is_never_below_the_truth_while_others_write(self, place: Path) -> None:
        """While others put and delete, `usage` counts at least the entries that exist all the time.

        These are the entries that `look` finds both before and after the call of `usage`.
        """
        self.needs("shared")
        with self.opened(place) as backend:

            def work(writer: int) -> None:
                with self.opened(place) as other:
                    names = [key(f"{writer} {number}") for number in range(40)]
                    for number, name in enumerate(names):
                        other.put(name, bytes(10 + 40 * number))
                    for name in names:
                        assert other.delete(name) > 0
                    other.put(key(writer), b"done")

            def watch() -> None:
                ends = {key(1), key(2)}
                after = self.look(place)
                for _ in range(20_000):
                    before, usage, after = after, backend.usage(), self.look(place)
                    held = [after[name] for name in before if name in after]
                    assert usage.bytes >= sum(held)
                    assert usage.entries >= len(held)
                    if after.keys() == ends:
                        break

            run_forked(lambda: run_forked(lambda: work(1), lambda: work(2)), watch)
            self.agree(backend, place, {key(1): b"done", key(2): b"done"})

    def test_a_large_cache_costs_no_more_than_a_small_one(self, place: Path) -> None:
        """With more entries, `usage` and the start of `coldest` need no more calls or memory.

        A read-only handle, and a handle that is opened after a crash, may need more, because they
        may count all entries again. They are not tested here.
        """
        usages: list[tuple[int, int]] = []
        starts: list[tuple[int, int]] = []
        with self.opened(place) as backend:
            for start, end in ((0, 50), (50, _LARGE), (_LARGE, 3 * _LARGE)):
                with backend.batch():
                    for number in range(start, end):
                        backend.put(key(number), b"x")
                backend.usage()
                usages.append(work_of(backend.usage))
                starts.append(work_of(lambda: next(backend.coldest())))
        for (calls, size), (more_calls, more_size) in (usages[:2], starts[1:]):
            assert more_calls <= 2 * calls + 100
            assert more_size <= 2 * size + 65_536

    def test_more_than_max_size_is_put_or_refused(self, place: Path) -> None:
        """A put beyond the cap, which only the engine enforces, works or raises `BackendError`.

        In both cases, the stored values stay whole and counted, and deletes make room again.
        """
        cap = 1 << 20
        with self.opened(place, max_size=cap) as backend:
            put: dict[str, bytes] = {}
            for number in range(48):
                name = key(number)
                value = sealed(name, number, cap // 16)
                try:
                    backend.put(name, value)
                except BackendError:
                    continue
                put[name] = value
            assert len(put) >= 10
            self.agree(backend, place, put)
            for name in list(put):
                assert backend.delete(name) > 0
            self.agree(backend, place, {})
            backend.put(key(1), sealed(key(1), 1, cap // 2))
            self.agree(backend, place, {key(1): sealed(key(1), 1, cap // 2)})

    def test_a_place_that_is_something_else(self, tmp_path: Path) -> None:
        """If the place is a file, the backend raises `BackendError`, and leaves the file unchanged.

        It creates no other file beside the place.
        """
        self.needs("persistent")
        place = tmp_path / "a file"
        place.write_bytes(b"not a directory")
        with pytest.raises(BackendError), self.opened(place) as backend:
            backend.put(key(1), b"value")
        assert place.read_bytes() == b"not a directory"
        assert os.listdir(tmp_path) == ["a file"]

    # -- read-only -------------------------------------------------------------------------------

    def test_reading_only_changes_nothing(self, place: Path) -> None:
        """A read-only handle finds all entries, changes nothing, and `put` raises `BackendError`.

        If the place does not exist, the handle finds nothing, and does not create the place.
        """
        self.needs("persistent")
        with self.opened(place, read_only=True) as early:
            self._use_everything(early, {})
            assert not place.exists()
            with self.opened(place) as backend:
                names = self.fill(backend, 5)
            before = self.snapshot(place)
            assert before
            expected = {name: sealed(name, number, 100) for number, name in enumerate(names)}
            with self.opened(place, read_only=True) as late:
                for backend in (early, late) if self.shared else (late,):
                    self._use_everything(backend, expected)
                    self.agree(backend, place, expected)
            assert self.snapshot(place) == before

    def _use_everything(self, backend: Backend, expected: Mapping[str, bytes]) -> None:
        for name, act in EVERYTHING.items():
            with suppress(BackendError) if name in CHANGES else nullcontext():
                act(backend)
        with pytest.raises(BackendError):
            backend.put(key(1), b"other")
        assert backend.get(key(1)) == backend.use(key(1)) == expected.get(key(1))
        for infos in (backend.scan(), backend.coldest()):
            assert sorted(info.key for info in infos) == sorted(expected)

    # -- closed ----------------------------------------------------------------------------------

    def test_a_handle_that_is_closed_or_has_lost_its_place(self, place: Path) -> None:
        """After `close`, or after the place was removed, a method works or raises `BackendError`.

        The same is true of an iteration that has begun. If the attribute `heals` is true, a put
        creates a removed place again.
        """
        for act in EVERYTHING.values():
            for removed in (False, True) if self.persistent else (False,):
                with self.opened(place) as backend:
                    self.fill(backend, 10)
                    iterations = [backend.coldest(), backend.scan()]
                    for infos in iterations:
                        next(infos)
                    if removed:
                        shutil.rmtree(place)
                    else:
                        backend.close()
                    with suppress(BackendError):
                        act(backend)
                    for infos in iterations:
                        with suppress(BackendError):
                            found = [info.key for info in infos]
                            assert len(found) == len(set(found))
                    if removed and self.heals:
                        backend.put(key("next"), b"next")
                        assert backend.get(key("next")) == b"next"
                        self.not_below_the_truth(backend, place)
                    elif not removed:
                        with suppress(BackendError):
                            assert backend.get(key(0)) == sealed(key(0), 0, 100)
                shutil.rmtree(place, ignore_errors=True)

    def test_opening_many_times_leaks_nothing(self, place: Path) -> None:
        """After handles were opened and closed, no file stays open, and nothing is left over."""
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

    def test_what_repair_mends_stays_mended(self, place: Path) -> None:
        """After values were damaged and `check(repair=True)` was called, `check` finds nothing."""
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

    # -- other people's files ----------------------------------------------------------------------

    def test_a_directory_of_others_is_left_alone(self, place: Path) -> None:
        """A place with files of other programs is rejected with `BackendError`, and not changed."""
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
        """If a stored value is far beyond the cap, a read returns None or raises `BackendError`."""
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
