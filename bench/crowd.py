"""The chapter about processes: how many gets or puts several of them manage together."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO

from findings import Timing
from measure import Round, interleave
from plan import KIB, Found, Plan
from population import entry, key

import kcache

BACKENDS = ("file", "zstd", "lmdb", "zstd+lmdb")
COUNT = 2_000
PAYLOAD = 4 * KIB

#: Says when it is ready, starts when it is told to, and says how often it managed to.
_WORKER = """\
import sys
sys.path.insert(0, {bench!r})
import random
import time
import kcache
from population import entry, key

choice = random.Random({number})
done = 0
with kcache.open_engine({directory!r}, backend={backend!r}, max_size={cap}) as engine:
    new = [entry(number, {payload}) for number in range(16)]
    keys = [key(number) for number in range({count})]
    engine.get(keys[0])
    print("ready", flush=True)
    sys.stdin.readline()
    end = time.perf_counter() + {seconds}
    while time.perf_counter() < end:
        if {writes}:
            fine = engine.put(key(f"{number} {{time.time_ns()}} {{done}}"), new[done % 16])
        else:
            fine = engine.get(choice.choice(keys))
        if not fine:
            raise SystemExit("failed")
        done += 1
print(done)
"""


def crowd(plan: Plan, folder: Path) -> Found:
    """Readers of one cache, and writers to another at its cap; nothing was promised."""
    tasks: list[Callable[[], Round]] = []
    for backend in BACKENDS:
        for kind in ("get", "put"):
            place = folder / kind
            cap = _fill(place, backend)
            worker = partial(
                _WORKER.format,
                bench=str(Path(__file__).parent),
                directory=str(place),
                backend=backend,
                cap=cap,
                count=COUNT,
                payload=PAYLOAD,
                writes=kind == "put",
                seconds=plan.crowd_seconds,
            )
            for size in plan.crowds:
                codes = [worker(number=number) for number in range(size)]
                name = f"{backend} {kind} {size}"
                tasks.append(partial(_together, name, codes, plan.crowd_seconds))
    rounds = interleave(plan.crowd_rounds, tasks)
    for kind in ("get", "put"):
        for backend in BACKENDS:
            for size in plan.crowds:
                yield Timing(
                    "crowd",
                    f"`{backend}`, {kind}",
                    f"one operation of 4 KiB among so many processes at once: {size}",
                    rounds.summary(f"{backend} {kind} {size}"),
                )


def _fill(folder: Path, backend: str) -> int:
    """Puts what is read or evicted; returns a cap that is reached by it."""
    with kcache.open_engine(folder, backend=backend) as engine:
        for number in range(COUNT):
            engine.put(key(number), entry(number, PAYLOAD))
        return engine.size_bytes


def _together(name: str, codes: list[str], seconds: float) -> Round:
    """Runs workers at once; returns the seconds per operation, those of all counted together."""
    with ExitStack() as stack:
        workers = [stack.enter_context(_start(code)) for code in codes]
        for worker in workers:
            if _pipe(worker.stdout).readline().strip() != "ready":
                raise RuntimeError(f"{name}: a worker failed")
        for worker in workers:
            _pipe(worker.stdin).write("go\n")
            _pipe(worker.stdin).flush()
        done = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise RuntimeError(f"{name}: a worker failed")
    return {name: seconds / sum(map(int, done))}


def _start(code: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise RuntimeError("no pipe")
    return pipe
