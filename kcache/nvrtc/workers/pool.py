"""Pool: the workers of this process, shared by all of its caches."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kcache import environment as process_environment
from kcache.nvrtc.workers.cores import usable_cores
from kcache.nvrtc.workers.harmless import are_harmless
from kcache.nvrtc.workers.messages import Ask, Hello, Reply, Status
from kcache.nvrtc.workers.process import CrashedError, WorkerProcess, standing
from kcache.util.forks import after_fork

if TYPE_CHECKING:
    from kcache.nvrtc.workers.slots import Slots

__all__ = ["WorkerPool", "shared"]

#: An idle worker is ended after this many seconds. A development loop asks more often, and an idle
#: worker holds 60 to 450 MB.
IDLE_SECONDS = 30.0
#: A worker is ended after this many compiles, or when it holds this much memory. NVRTC grows by
#: some 100 KB with each compile of CUB.
MAX_COMPILES = 500
MAX_BYTES = 3 << 30
#: How often one request is tried: a worker that somebody killed, or that ran out of memory, costs
#: no kernel.
_TRIES = 2


class WorkerPool:
    """Workers, started when they are needed, at most one for each usable core.

    Threads: safe to share; each compile has a worker of its own, and waits for one if all are busy.
    Fork: a child starts with none. Crash: workers end with this process. Exit: they are ended.

    Args:
        most: workers at a time; by default one for each usable core.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = usable_cores() if most is None else most
        self._hellos: dict[str, Hello] = {}
        self._reset()
        after_fork(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._idle: list[tuple[float, WorkerProcess]] = []
        self._busy: set[WorkerProcess] = set()
        #: How many workers exist or are being started.
        self._count = 0
        #: How many threads are about to take a worker or wait for one, and are not patient.
        self._waiting = 0
        self._timer: threading.Timer | None = None
        self._owner = os.getpid()

    def after_fork(self) -> None:
        """Start with no workers in a child process."""
        workers = [*self._busy, *(worker for _, worker in self._idle)]
        self._reset()
        for worker in workers:
            worker.forget()

    def hello(self, library: str) -> Hello:
        """Return what a worker says of a library.

        Raises:
            NoWorkerError: no worker can be started, or it can't load the library.
        """
        known = self._hellos.get(library)
        if known is None:
            with self._worker(library) as worker:
                known = worker.hello
        return known

    def compile(
        self,
        library: str,
        ask: Ask,
        *,
        family: object = None,
        timeout: float | None = None,
        slots: Slots | None = None,
        patient: bool = False,
    ) -> tuple[Hello, Reply]:
        """Compile a request in a worker; return the worker's hello, and its reply.

        Args:
            library: path of the compiler.
            ask: the request; `environment` is completed here.
            family: equal for requests that share a precompiled header.
            timeout: seconds that the compile may take.
            slots: they bound the compiles of all processes together.
            patient: nobody waits for this compile, so it lets all others go first, and is not tried
                again.

        Raises:
            NoWorkerError: no worker can be started; CrashedError: the compiler crashed, twice;
            TooLateError: it took too long.
        """
        for left in reversed(range(1 if patient else _TRIES)):
            try:
                return self._compile(
                    library, ask, family, timeout=timeout, slots=slots, patient=patient
                )
            except CrashedError:
                if not left:
                    raise
        raise AssertionError

    def _compile(
        self,
        library: str,
        ask: Ask,
        family: object,
        *,
        timeout: float | None,
        slots: Slots | None,
        patient: bool,
    ) -> tuple[Hello, Reply]:
        own = ask.environment
        while True:
            with self._worker(library, family, ask.directory, patient) as worker:
                environment = {**process_environment.changed_variables(worker.environment), **own}
                ask = ask._replace(environment=environment)
                if slots is None:
                    reply = worker.ask(ask, timeout)
                else:
                    with slots.held():
                        reply = worker.ask(ask, timeout)
                new = worker.compiles == 1
                if not _clean_after(worker, ask, reply):
                    worker.end()
                else:
                    worker.family = family
                    worker.directory = ask.directory
            # This worker got other variables before, or can't enter the program's directory. A new
            # one gets the program's present variables and starts in its directory.
            if reply.status not in (Status.ELSEWHERE, Status.FAILED) or new:
                return worker.hello, reply

    # -- workers -----------------------------------------------------------------------------------

    @contextmanager
    def _worker(
        self, library: str, family: object = None, directory: str = "", patient: bool = False
    ) -> Generator[WorkerProcess]:
        """Hold a worker during the block; return it to the pool unless it was ended meanwhile."""
        worker = self._take(library, family, directory, patient)
        if worker is None:
            try:
                worker = WorkerProcess(library, process_environment.variables())
            except BaseException:
                self._gone()
                raise
            self._hellos[library] = worker.hello
            with self._changed:
                self._busy.add(worker)
        try:
            yield worker
        except BaseException:
            worker.end()
            raise
        finally:
            self._give_back(worker)

    def _take(
        self, library: str, family: object, directory: str, patient: bool
    ) -> WorkerProcess | None:
        """Return an idle worker; None if the caller may start one, which is already counted."""
        here = standing()
        with self._changed:
            self._waiting += not patient
            try:
                while (patient and self._waiting) or not (self._idle or self._count < self.most):
                    self._changed.wait()
                return self._chosen(library, family, directory, here)
            finally:
                self._waiting -= not patient
                if not self._waiting:
                    self._changed.notify_all()  # the threads that are patient

    def _chosen(
        self, library: str, family: object, directory: str, here: tuple[object, ...]
    ) -> WorkerProcess | None:
        """Return an idle worker, that of the family if there is one; None to start a new one.

        It prefers a worker with the same working directory, which the compiler may remember: a
        proof has another one.
        """
        fitting = [
            each
            for each in self._idle
            if each[1].library == library and each[1].standing == here and each[1].is_whole()
        ]
        if fitting:
            told = [each for each in fitting if each[1].directory in (directory, None)]
            of_family = [each for each in told if each[1].family == family]
            spare = [each for each in told if each[1].family is None]
            chosen = (of_family or spare or fitting)[-1]
            if of_family or spare or self._count >= self.most:
                self._idle.remove(chosen)
                self._busy.add(chosen[1])
                return chosen[1]
        if self._count < self.most:
            self._count += 1
        else:  # an idle one of another library, or user
            _, worker = self._idle.pop(0)
            worker.end()
        return None

    def _give_back(self, worker: WorkerProcess) -> None:
        if self._owner != os.getpid():  # a fork happened in the middle of a compile
            return
        with self._changed:
            self._busy.discard(worker)
            if worker.ended:
                self._count -= 1
            else:
                self._idle.append((time.monotonic(), worker))
                self._watch()
            self._changed.notify()

    def _gone(self) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify()

    def _watch(self) -> None:
        """End idle workers after a while."""
        if self._timer is None:
            timer = threading.Timer(IDLE_SECONDS, self._end_idle)
            timer.daemon = True
            # Python 3.12 starts no thread once the main thread has ended. The other threads may go
            # on and compile. Then the workers end with the interpreter, which is soon.
            with suppress(RuntimeError):
                timer.start()
                self._timer = timer

    def _end_idle(self) -> None:
        with self._changed:
            self._timer = None
            old = time.monotonic() - IDLE_SECONDS
            ending = [worker for since, worker in self._idle if since <= old]
            self._idle = [each for each in self._idle if each[0] > old]
            self._count -= len(ending)
            if self._idle:
                self._watch()
            self._changed.notify_all()
        for worker in ending:
            worker.end()

    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        with self._changed:
            return [w.pid for w in (*self._busy, *(worker for _, worker in self._idle))]

    def close(self) -> None:
        """End all workers, also busy ones; the next compile starts new ones."""
        with self._changed:
            timer, self._timer = self._timer, None
            idle = [worker for _, worker in self._idle]
            self._count -= len(idle)
            self._idle.clear()
            busy = list(self._busy)
        for worker in busy:
            worker.stop()  # the thread that waits for it ends it
        for worker in idle:
            worker.end()
        if timer is not None:
            timer.cancel()
            timer.join()


def _clean_after(worker: WorkerProcess, ask: Ask, reply: Reply) -> bool:
    """Tell whether a worker compiles the next request as a new one would."""
    if reply.status != Status.COMPILED or not are_harmless(ask.flags):
        return False
    return worker.compiles < MAX_COMPILES and worker.peak < MAX_BYTES


def shared(most: int | None = None) -> WorkerPool:
    """Return the pool of this process; `most` bounds its workers from now on, if given."""
    if most is not None:
        _shared.most = most
    return _shared


_shared = WorkerPool()
atexit.register(_shared.close)
