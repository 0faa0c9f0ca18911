"""A storm of SIGKILLs over processes that put, get, delete, evict, clear and reopen one cache.

The parent kills a random process at a random moment, often microseconds after an operation began,
looks at the medium from outside while the others are stopped, has a fresh process use the cache,
and goes on.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from core.helpers import key
from faults.places import (
    disk_bound,
    disk_usage,
    held_locks,
    is_lmdb,
    is_whole,
    leftovers,
    sealed,
    truth,
)

from kcache import CacheEngine, open_engine

CAP = 1_500_000
#: Numbers of the entries: together some 4 MB, 2 compressed, so that puts evict.
ENTRIES = 400
#: The largest entry's content, and all of it as it is stored, bytes.
CONTENT = 60_000
LARGEST = 64 << 10
#: A process that takes longer than this many seconds for one operation hangs.
PATIENCE = 30
#: While the others are stopped, the parent waits at most this long for what one of them holds.
FROZEN = 2.0
#: After this many kills, all processes are killed at once. Then no lock may be held at all.
MASSACRE = 8

#: A process writes to its pipe: BEGIN before an operation, and a letter after it: a hit, ...
BEGIN = b"."
#: ... and of these two, none may come.
WRONG = {"C": "damaged entries found by the checksum", "X": "damaged entries served"}


# -- in the children -------------------------------------------------------------------------------


class Worker:
    """Uses the cache at random, and reports every operation."""

    def __init__(self, place: Path, name: str, seed: int, report: int) -> None:
        self._place = place
        self._name = name
        self._random = Random(seed)
        self._report = report
        self._engine = self._open()

    def run(self) -> None:
        while True:
            self.step()

    def step(self) -> None:
        signal.alarm(PATIENCE)
        random = self._random
        choice = random.randrange(1000)
        number = random.randrange(ENTRIES)
        os.write(self._report, BEGIN)
        if choice < 450:
            self.put(number)
        elif choice < 850:
            self.get(number)
        elif choice < 920:
            self.say("d" if self._engine.delete(key(number)) else "n")
        elif choice < 940:
            self._engine.trim(random.randrange(CAP // 2, CAP))
            self.say("t")
        elif choice < 942:
            self._engine.clear()
            self.say("c")
        elif choice < 960:
            self._engine.close()
            self._engine = self._open()
            self.say("o")
        else:
            entries = (
                self._engine.backend.coldest() if choice < 980 else self._engine.backend.scan()
            )
            for _ in entries:
                pass
            self.say("s")

    def put(self, number: int) -> bool:
        random = self._random
        size = random.choice((200, 2_000, 20_000, CONTENT))
        found = sealed(number, random.randrange(1 << 30), random.randrange(size // 2, size))
        stored = self._engine.put(key(number), found)
        self.say("p" if stored else "r")
        return stored

    def get(self, number: int) -> None:
        found = self._engine.get(key(number))
        if found is None:
            self.say("m")
        else:
            self.say("h" if is_whole(number, found) else "X")

    def say(self, result: str) -> None:
        stats = self._engine.stats()
        trouble = "C" * (stats.corrupt - self._corrupt) + "e" * (stats.errors - self._errors)
        self._corrupt, self._errors = stats.corrupt, stats.errors
        os.write(self._report, (result + trouble).encode())

    def _open(self) -> CacheEngine:
        self._corrupt = self._errors = 0
        return open_engine(self._place, backend=self._name, max_size=CAP)


def probe(worker: Callable[[], Worker]) -> None:
    """What the next process does: it opens the cache, reads, and puts."""
    signal.alarm(PATIENCE)
    probing = worker()
    for number in range(0, ENTRIES, 10):
        probing.get(number)
    for number in range(ENTRIES, ENTRIES + 5):
        if probing.put(number):
            return
    raise AssertionError("five puts were refused")


# -- in the parent ---------------------------------------------------------------------------------


@dataclass
class Report:
    """What a storm has counted."""

    bound: int
    disk_bound: int
    kills: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    looks: int = 0
    void_looks: int = 0
    problems: list[str] = field(default_factory=list)


class Child:
    """A process, and the reading end of its pipe."""

    def __init__(self, work: Callable[[int], None]) -> None:
        self.pipe, writing = os.pipe()
        self.pid = _fork(lambda: work(writing), self.pipe)
        os.close(writing)

    def read(self, timeout: float) -> bytes:
        """Returns what it has reported since the last time; waits for that if need be."""
        ready, _, _ = select.select([self.pipe], [], [], timeout)
        return os.read(self.pipe, 1 << 16) if ready else b""

    def end(self, how: int | None = None) -> tuple[int, bytes]:
        """Kills it, or waits for its end; returns its exit status, and the rest of its report."""
        rest = bytearray()
        if how is not None:
            os.kill(self.pid, how)
        while part := self.read(2 * PATIENCE):
            rest += part
        os.close(self.pipe)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), bytes(rest)


class Storm:
    """Starts, kills and replaces processes; `run` returns what was counted."""

    def __init__(self, place: Path, name: str, *, processes: int = 6, seed: int = 1) -> None:
        self._place = place
        self._name = name
        self._random = Random(seed)
        self._processes = processes
        self._children: list[Child] = []
        writers = processes + 2  # and the parent, and a fresh process
        bound = CAP if is_lmdb(name) else int((CAP + writers * LARGEST) * 1.02)
        most = disk_bound(name, CAP, writers=writers, largest=LARGEST, entries=ENTRIES + 5)
        self.report = Report(bound, most)

    def run(self, kills: int) -> Report:
        report = self.report
        with open_engine(self._place, backend=self._name, max_size=CAP) as engine:
            try:
                while report.kills < kills and not report.problems:
                    self._refill()
                    if report.kills % MASSACRE == MASSACRE - 1:
                        self._kill_all()
                    else:
                        self._kill_one()
                    self._look(engine)
                    self._probe()
            finally:
                self._kill_all()
            self._finish(engine)
        return report

    def _worker(self, seed: int, pipe: int) -> Worker:
        return Worker(self._place, self._name, seed, pipe)

    def _refill(self) -> None:
        while len(self._children) < self._processes:
            seed = self._random.getrandbits(32)
            self._children.append(Child(lambda pipe, seed=seed: self._worker(seed, pipe).run()))

    def _kill_one(self) -> None:
        child = self._children.pop(self._random.randrange(len(self._children)))
        for other in self._children:
            self._count(other.read(0))
        for _ in range(self._random.randrange(1, 4)):
            said = child.read(2 * PATIENCE)
            self._count(said)
        if not said.endswith(BEGIN):
            said = child.read(2 * PATIENCE)
            self._count(said)
        _pass_time(10 ** self._random.uniform(-6.5, -2))
        self._end(child, signal.SIGKILL)

    def _kill_all(self) -> None:
        children, self._children = self._children, []
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
        for child in children:
            self._end(child)
        if children and (held := held_locks(self._place, self._name)):
            self._broken(f"{held} locks are held by nobody")

    def _end(self, child: Child, how: int | None = None) -> None:
        status, rest = child.end(how)
        self._count(rest)
        self.report.kills += 1
        if status != -signal.SIGKILL:
            self._broken(f"a process ended by itself: {status}")

    def _count(self, said: bytes) -> None:
        self.report.counts.update(said.decode())
        for letter, what in WRONG.items():
            if letter.encode() in said:
                self._broken(what)

    def _broken(self, what: str) -> None:
        self.report.problems.append(f"{what} (after {self.report.kills} kills)")

    # -- looking ---------------------------------------------------------------------------------

    def _look(self, engine: CacheEngine) -> None:
        report = self.report
        report.looks += 1
        # This opens the files that are closed around forks, while no process is stopped.
        engine.backend.usage()
        with self._stopped() as waited:
            usage = engine.backend.usage()
            sizes = truth(self._place, self._name)
            on_disk = disk_usage(self._place)
        if waited():
            report.void_looks += 1
            return
        held = sum(sizes.values())
        if usage.bytes < held or usage.entries < len(sizes):
            self._broken(f"{usage} is below the truth: {held} bytes, {len(sizes)} entries")
        if held > report.bound:
            self._broken(f"{held} stored bytes, more than {report.bound}")
        if on_disk > report.disk_bound:
            self._broken(f"{on_disk} bytes on disk, more than {report.disk_bound}")

    @contextmanager
    def _stopped(self) -> Iterator[Callable[[], bool]]:
        """Stops every process, so that the medium shows one instant.

        One of them may hold what a look needs; then all go on after a while, and the look is void.
        """
        for child in self._children:
            os.kill(child.pid, signal.SIGSTOP)
        for child in self._children:
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        thawed = threading.Event()

        def thaw() -> None:
            thawed.set()
            for child in self._children:
                os.kill(child.pid, signal.SIGCONT)

        timer = threading.Timer(FROZEN, thaw)
        timer.start()
        try:
            yield thawed.is_set
        finally:
            timer.cancel()
            timer.join()
            for child in self._children:
                os.kill(child.pid, signal.SIGCONT)

    def _probe(self) -> None:
        seed = self._random.getrandbits(32)
        child = Child(lambda pipe: probe(lambda: self._worker(seed, pipe)))
        status, said = child.end()
        self._count(said)
        if status:
            self._broken(f"the next process ended with {status}")

    def _finish(self, engine: CacheEngine) -> None:
        """One pass over what is left heals it; then everything has to be right, exactly."""
        list(engine.backend.check())
        engine.trim(CAP // 2)
        for _ in engine.backend.coldest():
            pass
        for what in engine.backend.check():
            self._broken(f"not healed: {what}")
        sizes = truth(self._place, self._name)
        if engine.backend.usage() != (sum(sizes.values()), len(sizes)):
            self._broken(f"{engine.backend.usage()}, but there are {sum(sizes.values())} bytes")
        if left := leftovers(self._place, self._name):
            self._broken(f"{len(left)} orphans are left")
        for number in range(ENTRIES + 5):
            found = engine.get(key(number))
            if (found is None) is (key(number) in sizes):
                self._broken(f"entry {number} is not what the medium says")
            elif found is not None and not is_whole(number, found):
                self._broken(f"entry {number} is damaged")
        if engine.stats().corrupt or engine.stats().errors:
            self._broken(f"the parent counted {engine.stats()}")


def _pass_time(seconds: float) -> None:
    """Waits, to the microsecond."""
    until = time.perf_counter() + seconds
    if seconds > 0.002:
        time.sleep(seconds - 0.001)
    while time.perf_counter() < until:
        pass


def _fork(work: Callable[[], None], *others: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for other in others:
            os.close(other)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
