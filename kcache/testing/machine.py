"""BackendMachine: does random operations on a backend, and compares the backend with a model."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from random import Random

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kcache.backend import Backend, NoBackend
from kcache.testing._base import ContractBase, StopError, key, run_forked
from kcache.testing.doubles import FakeClock

#: Keys that differ little, keys that share their first digits, and others.
KEYS = [
    "0" * 64,
    "0" * 63 + "1",
    "1" + "0" * 63,
    "f" * 63 + "e",
    "0f" * 32,
    "123e" * 16,
    *(f"01{key(number)[2:]}" for number in range(3)),
    *map(key, range(3)),
]

#: Sizes of values: small ones, others near 4, 8, 16 and 64 KiB (the sizes of pages), and 1 MiB.
SIZES = [
    *(0, 1, 2, 15, 255, 256, 1000, 2000, 2048),
    *(size + more for size in (4096, 8192, 16384, 65536) for more in (-17, -1, 0, 1, 17)),
    1 << 20,
]
DEFAULTS = hypothesis.settings(
    max_examples=20,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
)

#: A change is a pair of a key and the size of the value to put, or None to delete, or -1 to touch.
_CHANGES = st.tuples(st.sampled_from(KEYS), st.sampled_from([*SIZES, None, None, -1, -1]))
_SEVERAL = st.lists(_CHANGES, max_size=6)
_LISTINGS = st.sampled_from(["coldest", "scan"])


class BackendMachine(RuleBasedStateMachine):
    """Compares a handle of a backend with a model: a dict of values, least recently used first.

    The handle has a place and a clock of its own.

    Args:
        suite: opens the backend, and reads its medium.
    """

    def __init__(self, suite: ContractBase) -> None:
        super().__init__()
        self.suite = suite
        self.clock = FakeClock()
        self.random = Random(0)
        self.folder = Path(tempfile.mkdtemp(prefix="kcache-machine-"))
        self.place = self.folder / "place"
        self.backend: Backend = suite.open(self.place, clock=self.clock)
        #: The values, least recently used first, and the time of the last use.
        self.model: dict[str, tuple[bytes, int]] = {}
        #: By how many seconds the clock is set back, and whether it was ever set back.
        self.behind, self.was_behind = 0.0, False

    def teardown(self) -> None:
        """Close the backend, and remove the place."""
        self.backend.close()
        self.backend.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @rule(change=_CHANGES)
    def change(self, change: tuple[str, int | None]) -> None:
        """`put` returns the new value's size on the medium, and `delete` that of the old value."""
        name, size = change
        before = self.suite.look(self.place).get(name, 0)
        returned = self._do(name, size)
        if size is None:
            assert returned == before
        elif size >= 0:
            assert self.suite.look(self.place)[name] == returned <= size + self.backend.overhead

    def _do(self, name: str, size: int | None) -> int:
        """Put, delete or touch an entry in backend and model; return what the backend returns."""
        self.suite.pass_time(self.clock)
        value, _ = self.model.pop(name, (None, 0))
        returned = 0
        if size is None:
            return self.backend.delete(name)
        if size == -1:
            self.backend.touch(name)
        else:
            value = self.random.choice((bytes, self.random.randbytes))(size)
            returned = self.backend.put(name, value)
        if value is not None:
            self.model[name] = value, self.clock()
        return returned

    @rule(name=st.sampled_from(KEYS))
    def get(self, name: str) -> None:
        """`get` returns the value that was put, and does not count as a use."""
        found = self.backend.get(name)
        assert found == self.model.get(name, (None, 0))[0]
        assert type(found) in (bytes, type(None))

    @rule(name=st.sampled_from(KEYS))
    def use(self, name: str) -> None:
        """`use` returns the value that was put, and counts as a use."""
        self.suite.pass_time(self.clock)
        value = self.model.pop(name, None)
        assert self.backend.use(name) == (None if value is None else value[0])
        if value is not None:
            self.model[name] = value[0], self.clock()

    @rule(outer=_SEVERAL, inner=_SEVERAL, nests=st.booleans(), fails=st.booleans())
    def batch(
        self,
        outer: Sequence[tuple[str, int | None]],
        inner: Sequence[tuple[str, int | None]],
        nests: bool,
        fails: bool,
    ) -> None:
        """Changes of a batch are visible in the batch, also in an inner batch.

        If a batch fails, either all of its changes stay or none, and the exception reaches the
        caller.
        """
        before, reached = dict(self.model), not fails
        with suppress(StopError):
            try:
                with self.backend.batch():
                    self._change_in_batch(outer)
                    with self.backend.batch() if nests else nullcontext():
                        self._change_in_batch(inner)
                    if fails:
                        raise StopError
            except StopError:
                reached = True
                raise
        assert reached, "the batch has swallowed an exception"
        if fails and self._values() != {name: value for name, (value, _) in self.model.items()}:
            self.model = before

    def _change_in_batch(self, changes: Sequence[tuple[str, int | None]]) -> None:
        for name, size in changes:
            if size != -1:  # the contract leaves open whether a failed batch keeps its uses
                self._do(name, size)
            self.get(name)
        assert self.backend.usage().entries == len(self.model)

    def _values(self) -> dict[str, bytes]:
        found = {name: self.backend.get(name) for name in KEYS}
        return {name: value for name, value in found.items() if value is not None}

    @rule(listing=_LISTINGS, changes=_SEVERAL)
    def iterate(self, listing: str, changes: list[tuple[str, int | None]]) -> None:
        """An iteration yields each entry once, and a changed entry at most once."""
        unchanged = self.model.keys() - {name for name, _ in changes}
        found: list[str] = []
        left = list(changes)
        for info in getattr(self.backend, listing)():
            found.append(info.key)
            if left:
                self.change(left.pop())
        assert len(found) == len(set(found))
        assert unchanged <= set(found)

    @rule()
    def list_all(self) -> None:
        """`coldest` yields entries in the order of last use.

        In `coldest` and `scan`, sizes are those on the medium, and times are those of the clock.
        """
        sizes = self.suite.look(self.place)
        infos = list(self.backend.coldest())
        if self.suite.exact_order:
            assert [info.key for info in infos] == list(self.model)
        for each in (infos, list(self.backend.scan())):
            assert {info.key: info.size for info in each} == sizes
            for info in each:
                late = abs(info.used_ns - self.model[info.key][1]) > self.suite.resolution
                assert self.was_behind or not (self.suite.takes_clock and late)

    @rule()
    def set_the_clock_back(self) -> None:
        """After the clock was set back, later uses of the same handle still count as later."""
        self.change((KEYS[0], 0))  # only a handle that has read the clock can notice that
        self.clock.advance(-3600)
        self.behind, self.was_behind = self.behind + 3600, True

    @precondition(lambda self: self.suite.shared and not self.behind and hasattr(os, "fork"))
    @rule(changes=_SEVERAL)
    def change_in_another_process(self, changes: Sequence[tuple[str, int | None]]) -> None:
        """A handle finds the puts and deletes of another process.

        It also finds the uses, after the other process has closed its own handle.
        """
        own = self.backend

        def work() -> None:
            with self.suite.opened(self.place, clock=self.clock) as self.backend:
                for change in changes:
                    self._do(*change)

        run_forked(work)
        self.backend = NoBackend("the model does the same")
        for change in changes:
            self._do(*change)
        self.backend = own
        self.list_all()

    @precondition(lambda self: self.suite.persistent)
    @rule()
    def open_anew(self) -> None:
        """A new handle finds the same entries as the closed one, in the same order of use.

        If the clock was set back, it is corrected first.
        """
        self.clock.advance(self.behind + 1)
        self.behind = 0.0
        self.backend.close()
        self.backend = self.suite.open(self.place, clock=self.clock)
        self.list_all()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        """The medium has the keys of the model, and `usage` is what the medium holds."""
        sizes = self.suite.look(self.place)
        assert sizes.keys() == self.model.keys()
        assert self.backend.usage() == (sum(sizes.values()), len(sizes))
