"""What the tests of workers share: one worker to talk to, and what it is asked."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from nvrtc.reference import Fresh

from kcache import environment
from kcache.nvrtc import compiler
from kcache.nvrtc.workers.messages import Ask, Reply, Status
from kcache.nvrtc.workers.process import WorkerProcess

ARCH_FLAGS = ("--gpu-architecture=sm_80",)


def ask(
    source: str,
    flags: Sequence[str] = ARCH_FLAGS,
    *,
    names: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    source_name: str = "kernel.cu",
    directory: Path | str | None = None,
    environment: Mapping[str, str | None] | None = None,
) -> Ask:
    return Ask(
        source,
        source_name,
        tuple(flags),
        tuple(names),
        dict(headers or {}),
        str(directory or os.getcwd()),
        dict(environment or {}),
    )


@contextmanager
def worker(library: str | None = None) -> Generator[WorkerProcess]:
    """Have a new worker."""
    process = WorkerProcess(library or compiler.find().path)
    try:
        process.start(environment.variables())
        yield process
    finally:
        process.end()


def fresh_of(reply: Reply) -> Fresh:
    """Return what a worker made in the form of what a plain compile gives."""
    log = reply.log.decode(errors="replace").strip("\0 \n")
    if reply.status != Status.COMPILED:
        return Fresh(None, None, None, {}, log, failed=True)
    return Fresh(*reply.outputs, {}, log, failed=False)
