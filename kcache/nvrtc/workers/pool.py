"""Pool: the workers of this process, shared by all of its caches."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress

from kcache import environment as process_environment
from kcache.nvrtc.options import are_harmless, parse_options
from kcache.nvrtc.workers.messages import Ask, Hello, Reply, Status
from kcache.nvrtc.workers.process import CrashedError, WorkerProcess
from kcache.util.cpus import usable_cores
from kcache.util.forks import after_fork

#: An idle worker is ended after this many seconds, because it holds 60 to 450 MB. In a development
#: loop, the pauses between compiles are shorter.
IDLE_SECONDS = 30.0
#: A worker is ended after this many compiles, or once it has used this many bytes of memory. With
#: each compile of CUB, NVRTC grows by some 100 KB.
MAX_COMPILES = 500
MAX_BYTES = 3 << 30


class WorkerPool:
    """A pool of workers, which are started when they are needed.

    Threads: All methods may be called from several threads at the same time. Each compile has a
    worker of its own, and waits for one if all are busy. Fork: A forked child starts without
    workers. Crash: Workers exit when this process is killed. Exit: The pool that `shared` returns
    ends its workers when the interpreter exits.

    Args:
        most: how many workers may run at the same time; by default one for each usable core.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self._hellos: dict[str, Hello] = {}
        after_fork(self)
        self._start_empty()

    def _start_empty(self) -> None:
        #: Protects the fields below; notified when a worker is no longer busy.
        self._changed = threading.Condition()
        self._busy: set[WorkerProcess] = set()
        #: When each idle worker became idle, the earliest first.
        self._idle: dict[WorkerProcess, float] = {}
        self._timer: threading.Timer | None = None

    def after_fork(self) -> None:
        """Make the pool of a forked child empty, because the workers belong to the parent."""
        for worker in (*self._idle, *self._busy):
            worker.forget()
        self._start_empty()

    def hello(self, library: str) -> Hello:
        """Return what a worker reports about the NVRTC at the path `library`.

        Raises:
            NoWorkerError: no worker can be started, or the worker can't load the library.
        """
        if library not in self._hellos:
            with self._worker(library) as worker:
                worker.reusable = True
        return self._hellos[library]

    def compile(self, library: str, ask: Ask, timeout: float | None = None) -> tuple[Hello, Reply]:
        """Compile a request in a worker; return the worker's first message and its reply.

        If the compiler crashes, the request is compiled once more, in another worker.

        Args:
            library: the path of the NVRTC that compiles.
            ask: the request. Its `environment` is completed by the variables that this process has
                changed since the worker was started.
            timeout: how many seconds the compile may take; None for no limit.

        Raises:
            NoWorkerError: no worker can be started, or the worker can't load the library.
            CrashedError: the compiler crashed twice.
            TooLateError: the compile exceeded `timeout`.
        """
        has_crashed = False
        while True:
            with self._worker(library, ask.directory) as worker:
                is_new = not worker.compiles
                changed = process_environment.changed_variables(worker.environment)
                asked = ask._replace(environment={**changed, **ask.environment})
                try:
                    reply = worker.ask(asked, timeout)
                except CrashedError:
                    if has_crashed:
                        raise
                    # The worker may have been killed, or may have run out of memory: try once more.
                    has_crashed = True
                    continue
                # Whether it compiles the next request as a new worker would.
                worker.reusable = (
                    reply.status == Status.COMPILED
                    and are_harmless(parse_options(ask.flags))
                    and worker.compiles < MAX_COMPILES
                    and worker.peak < MAX_BYTES
                )
            # This worker got other values of variables before, or can't enter the program's
            # directory. A new worker gets the present variables and starts in that directory.
            if is_new or reply.status not in (Status.ELSEWHERE, Status.FAILED):
                return worker.hello, reply

    # -- workers -----------------------------------------------------------------------------------

    @contextmanager
    def _worker(self, library: str, directory: str | None = None) -> Generator[WorkerProcess]:
        """Yield a worker for the block, and end the worker afterwards.

        If the block has set the worker's attribute `reusable`, the worker becomes idle instead.

        Raises:
            NoWorkerError: no worker can be started, or the worker can't load the library.
        """
        most = usable_cores() if self.most is None else self.most
        worker = new = WorkerProcess(library)
        surplus: list[WorkerProcess] = []
        try:
            with self._changed:
                while len(self._busy) >= most:
                    self._changed.wait()
                worker = self._choose(new, directory, most, surplus)
                self._busy.add(worker)
            for each in surplus:
                each.end()
            if worker is new:
                worker.start(process_environment.variables())
                self._hellos[library] = worker.hello
            worker.reusable = False
            yield worker
            worker.directory = directory
        finally:
            keep = worker.reusable
            try:
                if not keep:
                    worker.end()
            finally:
                with self._changed:
                    self._busy.discard(worker)
                    if keep:
                        self._idle[worker] = time.monotonic()
                        if self._timer is None:
                            self._end_later()
                    self._changed.notify_all()

    def _choose(
        self, new: WorkerProcess, directory: str | None, most: int, surplus: list[WorkerProcess]
    ) -> WorkerProcess:
        """Return an idle worker that can compile in place of `new`, or `new` if there is none.

        Workers that the caller must end are added to `surplus`.
        """
        surplus += (each for each in self._idle if each.ended or not each.is_whole())
        for each in surplus:
            del self._idle[each]
        fitting = [each for each in self._idle if each.kind == new.kind]
        # The compiler may cache its working directory.
        best = [each for each in fitting if each.directory in (directory, None)]
        is_full = len(self._idle) + len(self._busy) >= most
        if best or (is_full and fitting):
            chosen = (best or fitting)[-1]
            del self._idle[chosen]
            return chosen
        if is_full and self._idle:  # an idle worker with another library or user has to end
            surplus.append(next(iter(self._idle)))
            del self._idle[surplus[-1]]
        return new

    def _end_later(self) -> None:
        """Start the timer that ends idle workers."""
        timer = threading.Timer(IDLE_SECONDS, self._end_idle)
        # Python 3.12 starts no thread after the main thread has ended, when other threads may still
        # compile, and no daemon thread in a sub-interpreter. Then the workers end with the
        # interpreter.
        with suppress(RuntimeError):
            timer.daemon = True
            timer.start()
            self._timer = timer

    def _end_idle(self) -> None:
        with self._changed:
            self._timer = None
            before = time.monotonic() - IDLE_SECONDS
            old = [worker for worker, since in self._idle.items() if since <= before]
            for worker in old:
                del self._idle[worker]
            if self._idle:
                self._end_later()
        for worker in old:
            worker.end()

    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        with self._changed:
            return [worker.pid for worker in (*self._idle, *self._busy) if not worker.ended]

    def close(self) -> None:
        """End all workers, including busy ones; the next compile starts new ones."""
        with self._changed:
            idle, busy, timer = [*self._idle], [*self._busy], self._timer
            self._idle.clear()
            self._timer = None
        for worker in idle:
            worker.end()
        for worker in busy:
            worker.stop()  # its `end` is called by the thread that waits for its reply
        if timer is not None:
            timer.cancel()
            timer.join()


def shared(most: int | None = None) -> WorkerPool:
    """Return the pool of this process; if `most` is given, it is the pool's limit from now on."""
    if most is not None:
        _shared.most = most
    return _shared


_shared = WorkerPool()
atexit.register(_shared.close)
