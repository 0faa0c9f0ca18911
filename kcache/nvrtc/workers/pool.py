"""Pool: the workers of this process, shared by all of its caches."""

from __future__ import annotations

import atexit
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import ref

from kcache import environment as process_environment
from kcache.nvrtc.options import are_harmless, parse_options
from kcache.nvrtc.workers.messages import Ask, Hello, Reply, Status
from kcache.nvrtc.workers.process import CrashedError, WorkerProcess, standing
from kcache.nvrtc.workers.slots import usable_cores
from kcache.util.forks import after_fork
from kcache.util.locks import Turn, Turns

if TYPE_CHECKING:
    from collections.abc import Callable

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

    A worker is in use as long as the turn of the thread that took it lasts. So an exception at any
    point, such as that of a signal's handler, costs a worker at most, and never the place of one.

    Threads: safe to share; each compile has a worker of its own, and waits for one if all are busy.
    Fork: a child starts with none. Crash: workers end with this process. Exit: they are ended.

    Args:
        most: workers at a time; by default one for each usable core.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self._hellos: dict[str, Hello] = {}
        #: Whoever compiles has a turn.
        self._turns = Turns()
        #: Every worker, and since when it is idle.
        self._workers: dict[WorkerProcess, float] = {}
        #: The turn for which a worker is in use. Only `setdefault` takes a worker, so that it is
        #: one step for other threads, and for signals.
        self._users: dict[WorkerProcess, ref[Turn]] = {}
        self._timer: threading.Timer | None = None
        after_fork(self)

    def after_fork(self) -> None:
        """Start with no workers in a child process."""
        for worker in self._workers:
            worker.forget()
        self._workers, self._users, self._timer = {}, {}, None

    def hello(self, library: str) -> Hello:
        """Return what a worker says of a library.

        Raises:
            NoWorkerError: no worker can be started, or it can't load the library.
        """
        if library not in self._hellos:
            with self._turns_now().turn() as turn:
                self._give_back(self._take(turn, library))
        return self._hellos[library]

    def compile(self, library: str, ask: Ask, timeout: float | None = None) -> tuple[Hello, Reply]:
        """Compile a request in a worker; return the worker's hello, and its reply.

        Args:
            library: path of the compiler.
            ask: the request; `environment` is completed here.
            timeout: seconds that the compile may take.

        Raises:
            NoWorkerError: no worker can be started; CrashedError: the compiler crashed, twice;
            TooLateError: it took too long.
        """
        for left in reversed(range(_TRIES)):
            with self._turns_now().turn() as turn:
                try:
                    return self._compile(turn, library, ask, timeout)
                except CrashedError:
                    if not left:
                        raise
        raise AssertionError

    def _compile(
        self, turn: Turn, library: str, ask: Ask, timeout: float | None
    ) -> tuple[Hello, Reply]:
        own = ask.environment
        while True:
            worker = self._take(turn, library, ask.directory)
            new = not worker.compiles
            try:
                environment = {**process_environment.changed_variables(worker.environment), **own}
                reply = worker.ask(ask._replace(environment=environment), timeout)
            except BaseException:
                self._drop(worker)
                raise
            if _clean_after(worker, ask, reply):
                self._give_back(worker, ask.directory)
            else:
                self._drop(worker)
            # This worker got other variables before, or can't enter the program's directory. A new
            # one gets the program's present variables and starts in its directory.
            if reply.status not in (Status.ELSEWHERE, Status.FAILED) or new:
                return worker.hello, reply

    # -- workers -----------------------------------------------------------------------------------

    def _turns_now(self) -> Turns:
        self._turns.most = usable_cores() if self.most is None else self.most
        return self._turns

    def _take(self, turn: Turn, library: str, directory: str = "") -> WorkerProcess:
        """Return a worker for a turn: an idle one that fits, or a new one.

        Raises:
            NoWorkerError: no worker can be started, or it can't load the library.
        """
        here = standing()
        while True:
            idle = self._idle()
            full = len(self._workers) >= self._turns.most
            fitting = [each for each in idle if each.library == library and each.standing == here]
            # The compiler may remember its working directory.
            told = [each for each in fitting if each.directory in (directory, None)]
            best = told or (fitting if full else [])
            chosen = best[-1] if best else None
            if chosen is None and not (full and idle):
                return self._new(turn, library)
            if self._claim(turn, chosen or idle[0]):
                if chosen is not None:
                    return chosen
                self._drop(idle[0])  # one of another library or user makes room

    def _claim(self, turn: Turn, worker: WorkerProcess) -> bool:
        """Take an idle worker, unless another thread has done so; in one step for all threads."""
        return self._users.setdefault(worker, turn.ref) is turn.ref

    def _new(self, turn: Turn, library: str) -> WorkerProcess:
        worker = WorkerProcess(library)
        self._users[worker] = turn.ref
        self._workers[worker] = time.monotonic()
        try:
            worker.start(process_environment.variables())
        except BaseException:
            self._drop(worker)
            raise
        self._hellos[library] = worker.hello
        return worker

    def _idle(self) -> list[WorkerProcess]:
        """Return the idle workers, that of the oldest use first; end those that were lost."""
        idle: list[WorkerProcess] = []
        for worker in sorted(self._workers, key=lambda each: self._workers.get(each, 0.0)):
            user = self._users.get(worker)
            turn = None if user is None else user()
            if user is None and worker.is_whole():
                idle.append(worker)
            elif turn is None or turn.over:
                self._drop(worker)
        return idle

    def _give_back(self, worker: WorkerProcess, directory: str | None = None) -> None:
        worker.directory = directory
        self._workers[worker] = time.monotonic()
        self._users.pop(worker, None)
        self._watch()

    def _drop(self, worker: WorkerProcess) -> None:
        worker.end()
        self._workers.pop(worker, None)
        self._users.pop(worker, None)

    def _watch(self) -> None:
        """End idle workers after a while."""
        if self._timer is None:
            timer = threading.Timer(IDLE_SECONDS, self._end_idle)
            # Python 3.12 starts no thread once the main thread has ended, though the others may go
            # on and compile, nor a daemon in a sub-interpreter. Then the workers end with the
            # interpreter.
            with suppress(RuntimeError):
                timer.daemon = True
                timer.start()
                self._timer = timer

    def _end_idle(self) -> None:
        self._timer = None
        old = time.monotonic() - IDLE_SECONDS
        self._end_those(lambda worker: self._workers.get(worker, old) <= old)
        if self._idle():
            self._watch()

    def _end_those(self, to_end: Callable[[WorkerProcess], bool]) -> None:
        """End idle workers."""
        mine = self._turns.turn()  # nobody waits for it; it owns what is being ended
        for worker in self._idle():
            if to_end(worker) and self._claim(mine, worker):
                self._drop(worker)

    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return [worker.pid for worker in tuple(self._workers) if not worker.ended]

    def close(self) -> None:
        """End all workers, also busy ones; the next compile starts new ones."""
        timer, self._timer = self._timer, None
        self._end_those(lambda _: True)
        for worker in tuple(self._workers):
            worker.stop()  # the thread that waits for it ends it
        if timer is not None:
            timer.cancel()
            timer.join()


def _clean_after(worker: WorkerProcess, ask: Ask, reply: Reply) -> bool:
    """Tell whether a worker compiles the next request as a new one would."""
    if reply.status != Status.COMPILED or not are_harmless(parse_options(ask.flags)):
        return False
    return worker.compiles < MAX_COMPILES and worker.peak < MAX_BYTES


def shared(most: int | None = None) -> WorkerPool:
    """Return the pool of this process; `most` bounds its workers from now on, if given."""
    if most is not None:
        _shared.most = most
    return _shared


_shared = WorkerPool()
atexit.register(_shared.close)
