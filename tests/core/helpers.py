"""Shared by the tests of the core: keys, entries, looks at the raw directory."""

import hashlib
import logging
import os
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO

import pytest
import xxhash
from hypothesis import HealthCheck, settings

import kcache.cli
from kcache import Entry
from kcache.entry import FORMAT_VERSION, encode

_KEY = re.compile(r"[0-9a-f]{64}").fullmatch

_PYTHONPATH = os.pathsep.join(
    filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))
)
NOBODY = 65534
#: What an envelope begins with.
HEADER = struct.Struct("<6sHQd32sHHI")
#: For properties that are tried in a fraction of a second...
QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
#: ... and for the long versions of them.
LONG = settings(QUICK, max_examples=1000)


def key(number: object, head: str = "") -> str:
    """Returns a key, which begins with `head`."""
    return (head + hashlib.sha256(str(number).encode()).hexdigest())[:64]


def entry(size: int = 100, fill: int = 0, **metadata: float) -> Entry:
    """Returns an entry of `size` bytes of payload."""
    return Entry({"cubin": bytes((fill % 256,)) * size}, metadata)


def stored_size(size: int = 100) -> int:
    """Returns how many bytes `entry(size)` takes in a backend."""
    return len(encode(key(0), entry(size)))


def envelope(
    name: str,
    sections: Sequence[tuple[bytes, bytes]] = (),
    metadata: bytes = b"{}",
    *,
    producer: bytes = b"",
    sizes: Sequence[int] | None = None,
    **forged: object,
) -> bytes:
    """Builds an envelope from the table in the format's description, with any field forged."""
    lengths = [len(value) for _, value in sections] if sizes is None else sizes
    table = b"".join(
        bytes((len(title),)) + title + struct.pack("<Q", length)
        for (title, _), length in zip(sections, lengths, strict=True)
    )
    rest = producer + table + metadata + b"".join(value for _, value in sections)
    total, key = HEADER.size + len(rest) + 16, bytes.fromhex(name)
    fields = {
        "magic": b"KCACHE",
        "version": FORMAT_VERSION,
        "total": total,
        "cost": 0.0,
        "key": key,
    }
    counts = {"count": len(sections), "producer_length": len(producer)}
    counts["metadata_length"] = len(metadata)
    return seal(HEADER.pack(*(fields | counts | forged).values()) + rest)


def seal(body: bytes) -> bytes:
    """Appends the right checksum."""
    return body + xxhash.xxh3_128_digest(body)


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


def snapshot(place: Path) -> dict[str, tuple[object, ...]]:
    """Returns name -> kind, rights, times and content of all that is below a directory."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted([place, *place.rglob("*")]):
        status = path.lstat()
        content: object = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = path.read_bytes()
        times = (status.st_mtime_ns, status.st_ctime_ns)
        found[str(path.relative_to(place))] = (status.st_mode, status.st_nlink, *times, content)
    return found


def path_of(directory: Path | str, name: str) -> Path:
    """Returns the file in which a file backend keeps `name`."""
    return Path(directory) / name[:2] / name


def together(count: int, work: Callable[[], object]) -> list[object]:
    """Runs `work` in threads that start together; returns what each returned or raised."""
    return run_all(*[work] * count)


def run_all(*works: Callable[[], object]) -> list[object]:
    """Runs each in a thread, all from one moment on; returns what each returned or raised."""
    gate = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> object:
        gate.wait(60)
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(run, work) for work in works]
    return [future.exception() or future.result() for future in futures]


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may do it")

#: Whether QEMU runs the tests; `tests/aarch64.sh` sets the variable.
EMULATED = "TEST_EMULATED" in os.environ


def not_emulated(reason: str) -> pytest.MarkDecorator:
    """Skips a test under QEMU, which does what `reason` says."""
    return pytest.mark.skipif(EMULATED, reason=f"QEMU {reason}")


too_slow_in_qemu = not_emulated("is ten times slower, and this times or kills a compile")


# -- other processes ---------------------------------------------------------------------------


def run(
    *command: object, environ: Mapping[str, str | None] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end; None as a variable's value removes it."""
    changed = environ or {}
    environment = {k: v for k, v in os.environ.items() if k not in changed}
    environment |= {k: v for k, v in changed.items() if v is not None}
    words = list(map(str, command))
    return subprocess.run(
        words, capture_output=True, text=True, check=False, env=environment, cwd=cwd, timeout=900
    )


def python(
    code: str, *arguments: object, environ: Mapping[str, str | None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter that finds the helpers of the tests."""
    path = {"PYTHONPATH": _PYTHONPATH, **(environ or {})}
    return run(sys.executable, "-c", textwrap.dedent(code), *arguments, environ=path)


def output_of(
    code: str, *arguments: object, environ: Mapping[str, str | None] | None = None
) -> str:
    """Returns what code prints in a fresh interpreter; it must succeed."""
    done = python(code, *arguments, environ=environ)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def started(code: str, *arguments: object, **more: Any) -> subprocess.Popen[str]:
    """Starts code in such an interpreter, with pipes."""
    environ = {**os.environ, "PYTHONPATH": _PYTHONPATH, **more.pop("environ", {})}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environ, **pipes, **more)


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
    *words: object,
    environ: Mapping[str, str] | None = None,
    before: Callable[[], object] = lambda: None,
    mixed: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs the command `kcache` in a forked child, which saves the start of an interpreter.

    Args:
        before: what the child does first.
        mixed: whether errors come among the output, as on a terminal.
    """
    from kcache.cli import app  # noqa: F401  # here, and not in every child

    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        given = list(map(str, words))
        errors = out if mixed else err
        pid = fork(lambda: (before(), _become_command(given, environ or {}, out, errors)))
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


def in_child(work: Callable[[], object]) -> None:
    """Runs `work` in a forked child, where nothing may go wrong."""
    assert wait(fork(work)) == 0


def become_nobody() -> None:
    """Has this process lose its rights, if it has some."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """Has files made with these rights taken away, for the block."""
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


@contextmanager
def nobodys_directory() -> Iterator[Path]:
    """Makes a directory that user `NOBODY` owns, in a place that it can reach."""
    with tempfile.TemporaryDirectory(prefix="kcache-nobody-") as name:
        os.chmod(name, 0o755)
        cache = Path(name) / "cache"
        cache.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(cache, NOBODY, NOBODY)
        yield cache


def has_ended(process: int) -> bool:
    """Waits until a process that may be no child has ended."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 60)[0])
    finally:
        os.close(descriptor)


def wait(pid: int) -> int:
    """Waits for a child; returns its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
