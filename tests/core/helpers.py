"""Shared by the tests of the core: keys, entries, looks at the raw directory."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn, TextIO

from hypothesis import HealthCheck, settings

import kcache.cli
from kcache import Entry
from kcache.entry import encode

_KEY = re.compile(r"[0-9a-f]{64}").fullmatch

#: For properties that are tried in a fraction of a second...
QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
#: ... and for the long versions of them.
LONG = settings(QUICK, max_examples=1000)


def key(number: int | str, shard: int | None = None) -> str:
    """Returns a key; `shard` sets its first two digits."""
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    return digest if shard is None else f"{shard:02x}{digest[2:]}"


def entry(size: int = 100, fill: int = 0, **metadata: float) -> Entry:
    """Returns an entry of `size` bytes of payload."""
    return Entry({"cubin": bytes((fill % 256,)) * size}, metadata)


def stored_size(size: int = 100) -> int:
    """Returns how many bytes `entry(size)` takes in a backend."""
    return len(encode(key(0), entry(size)))


class Tree(NamedTuple):
    """What is in a file backend's directory: sizes of the entry files, and the other files."""

    entries: dict[str, int]
    temporary: list[Path]

    @property
    def bytes(self) -> int:
        return sum(self.entries.values())


def look(directory: Path | str) -> Tree:
    """Looks at the files of a file backend, without using the backend."""
    entries: dict[str, int] = {}
    temporary: list[Path] = []
    for shard in Path(directory).glob("[0-9a-f][0-9a-f]"):
        try:
            with os.scandir(shard) as items:
                for item in items:
                    if _KEY(item.name):
                        try:
                            entries[item.name] = item.stat(follow_symlinks=False).st_size
                        except FileNotFoundError:
                            continue
                    elif item.name.endswith(".tmp"):
                        temporary.append(Path(item.path))
        except FileNotFoundError:
            continue
    return Tree(entries, temporary)


def path_of(directory: Path | str, name: str) -> Path:
    """Returns the file in which a file backend keeps `name`."""
    return Path(directory) / name[:2] / name


def together(count: int, work: Callable[[], object]) -> list[object]:
    """Runs `work` in threads that start together; returns what each returned or raised."""
    gate = threading.Barrier(count)
    results: list[object] = []

    def run() -> None:
        gate.wait(60)
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    workers = [threading.Thread(target=run) for _ in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    return results


# -- other processes ---------------------------------------------------------------------------


def python(
    code: str, *arguments: object, environ: Mapping[str, str | None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter; None as a variable's value removes it."""
    changed = environ or {}
    environment = {k: v for k, v in os.environ.items() if k not in changed}
    environment |= {k: v for k, v in changed.items() if v is not None}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


def output_of(
    code: str, *arguments: object, environ: Mapping[str, str | None] | None = None
) -> str:
    """Returns what code prints in a fresh interpreter; it must succeed."""
    done = python(code, *arguments, environ=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def fork(work: Callable[[], object], *, limit: int = 60) -> int:
    """Runs `work` in a forked child that then exits without cleaning up; returns its pid.

    A child that takes longer than `limit` seconds, stops included, is ended.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, in 3.12
        pid = os.fork()
    if pid:
        return pid
    status = 1
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the parent's would raise an exception
    signal.alarm(limit)  # ends a child that waits for ever
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def command(
    *words: object, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command `kcache` in a forked child, which saves the start of an interpreter."""
    from kcache.cli import app  # noqa: F401  # here, and not in every child

    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = fork(lambda: _become_command(list(map(str, words)), environ or {}, out, err))
        code = wait(pid)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(list(words), code, out.read(), err.read())


def _become_command(
    words: list[str], environ: Mapping[str, str], out: TextIO, err: TextIO
) -> NoReturn:
    for number, file in ((1, out), (2, err)):
        os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = out, err
    logging.getLogger().handlers.clear()  # those of pytest
    os.environ.update(environ)
    sys.argv = ["kcache", *words]
    code: object = 1
    try:
        code = kcache.cli.main()
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else code is not None)


def wait(pid: int) -> int:
    """Waits for a child; returns its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
