"""ProofQueue: proves kernels good for other locations, in the background."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from kcache.nvrtc.workers.cores import usable_cores
from kcache.util import log
from kcache.util.forks import after_fork

if TYPE_CHECKING:
    from kcache.nvrtc.manifest import StoredHeaderSet
    from kcache.nvrtc.request import Request

__all__ = ["ProofQueue"]


class _Waiting(NamedTuple):
    """A kernel to prove."""

    request: Request
    header_set: StoredHeaderSet | None


class ProofQueue:
    """Proofs to be made in the background, while nobody else wants a worker.

    Threads: safe to share; it has threads of its own, which end when no proof is left. Processes:
    two may prove the same kernel, which only costs time. Crash and exit: a kernel that is not
    proven by then stays good for its location. Fork: a child begins with none.

    Args:
        prove: proves one kernel and stores the verdict.
    """

    def __init__(self, prove: Callable[[Request, StoredHeaderSet | None], object]) -> None:
        self._prove = prove
        self._reset()
        after_fork(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._threads = 0
        #: How many threads are in `held` and in `finish`.
        self._held = 0
        self._finishing = 0

    def _most(self) -> int:
        """Return how many threads there may be.

        It is half of the cores, so that a request meanwhile finds a worker; all of them once
        somebody waits for the proofs.
        """
        if self._finishing > 0:  # below 0 if a fork happened there
            return usable_cores()
        return 0 if self._held > 0 else max(1, usable_cores() // 2)

    def after_fork(self) -> None:
        """Leave everything to the parent."""
        self._reset()

    def add(self, request: Request, header_set: StoredHeaderSet | None) -> None:
        """Add a kernel that was just stored."""
        with self._changed:
            self._waiting.append(_Waiting(request, header_set))
            self._start_threads()

    @contextmanager
    def held(self) -> Generator[None]:
        """Begin no proof during the block, because it would take a worker from waiting requests."""
        with self._changed:
            self._held += 1
        try:
            yield
        finally:
            with self._changed:
                self._held -= 1
                self._start_threads()

    def finish(self) -> None:
        """Wait until everything is proven. An interrupt abandons what is left."""
        with self._changed:
            self._finishing += 1
            self._start_threads()
            try:
                while self._waiting or self._threads:
                    self._changed.wait()
            except BaseException:
                self._waiting.clear()
                raise
            finally:
                self._finishing -= 1

    def _start_threads(self) -> None:
        """Start threads for the waiting proofs; they end by themselves."""
        while self._threads < min(self._most(), self._threads + len(self._waiting)):
            thread = threading.Thread(target=self._run, name="kcache-proof", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread can be started, or the interpreter is ending
                self._waiting.clear()
                return
            self._threads += 1

    def _run(self) -> None:
        while True:
            with self._changed:
                # At its end, the interpreter ends the workers first: begin no new work.
                over = not threading.main_thread().is_alive()
                if over or not self._waiting or self._threads > self._most():
                    self._threads -= 1
                    self._changed.notify_all()
                    return
                request, header_set = self._waiting.popleft()
            try:
                self._prove(request, header_set)
            except Exception as error:  # nobody waits for it
                log.debug("%s is not proven: %r", request.source_name, error)
