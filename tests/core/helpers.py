"""Helpers of all tests: keys and entries, files of a `file` backend, threads and processes."""

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
#: The fields at the beginning of an envelope.
HEADER = struct.Struct("<6sHQd32sHHI")
#: Settings of Hypothesis for tests that take a fraction of a second.
QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
#: Settings of Hypothesis for the long versions of these tests.
LONG = settings(QUICK, max_examples=1000)


def key(number: object, head: str = "") -> str:
    """Return the key that belongs to `number`, with `head` as its first digits."""
    return (head + hashlib.sha256(str(number).encode()).hexdigest())[:64]


def entry(size: int = 100, fill: int = 0, **metadata: float) -> Entry:
    """Return an entry with `size` bytes of payload, all of which have the value `fill`."""
    return Entry({"cubin": bytes((fill % 256,)) * size}, metadata)


def stored_size(size: int = 100) -> int:
    """Return how many bytes `entry(size)` takes in a backend."""
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
    """Return an envelope that is built as the format's documentation says, without kcache's code.

    Args:
        name: the key.
        sections: the title and the value of each section.
        metadata: the encoded metadata.
        producer: the name of the producer.
        sizes: false sizes of the sections.
        forged: false values of fields of the header, by name.
    """
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
    """Return `body` with its correct checksum appended."""
    return body + xxhash.xxh3_128_digest(body)


class Tree(NamedTuple):
    """The files in a `file` backend's directory: the sizes of the entries, and temporary files."""

    entries: dict[str, int]
    temporary: list[Path]

    @property
    def bytes(self) -> int:
        return sum(self.entries.values())


def look(directory: Path | str) -> Tree:
    """Return the files of a `file` backend, without using the backend's code."""
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
    """Return the mode, link count, times and content of `place` and of all below it, by path."""
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
    """Return the path of the file in which a `file` backend stores the key `name`."""
    return Path(directory) / name[:2] / name


def together(count: int, work: Callable[[], object]) -> list[object]:
    """Run `work` in threads that start together; return what each returned or raised."""
    return run_all(*[work] * count)


def run_all(*works: Callable[[], object]) -> list[object]:
    """Run each function in a thread; all start together. Return what each returned or raised."""
    gate = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> object:
        gate.wait(60)
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(run, work) for work in works]
    return [future.exception() or future.result() for future in futures]


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may do it")

#: Whether the tests run under QEMU; `tests/aarch64.sh` sets the variable.
EMULATED = "TEST_EMULATED" in os.environ


def not_emulated(reason: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test under QEMU. `reason` completes a sentence about QEMU."""
    return pytest.mark.skipif(EMULATED, reason=f"QEMU {reason}")


too_slow_in_qemu = not_emulated("is ten times slower, and this times or kills a compile")


# -- other processes ---------------------------------------------------------------------------


def run(
    *command: object, environ: Mapping[str, str | None] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. A variable is removed if its value in `environ` is None."""
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
    """Run code to its end in a new interpreter that can import the tests' helpers."""
    path = {"PYTHONPATH": _PYTHONPATH, **(environ or {})}
    return run(sys.executable, "-c", textwrap.dedent(code), *arguments, environ=path)


def output_of(
    code: str, *arguments: object, environ: Mapping[str, str | None] | None = None
) -> str:
    """Return the output of code in a new interpreter, and assert that the code succeeds."""
    done = python(code, *arguments, environ=environ)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def started(code: str, *arguments: object, **more: Any) -> subprocess.Popen[str]:
    """Start code in a new interpreter that can import the tests' helpers; its streams are pipes."""
    environ = {**os.environ, "PYTHONPATH": _PYTHONPATH, **more.pop("environ", {})}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environ, **pipes, **more)


def fork(work: Callable[[], object], *, limit: int = 60) -> int:
    """Run `work` in a forked child, which then exits without cleaning up; return the child's pid.

    An alarm ends the child after `limit` seconds. Seconds in which the child is stopped count, too.
    """
    with warnings.catch_warnings():
        # Python 3.12 and later warn of a fork in a process with several threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    status = 1
    signal.signal(
        signal.SIGALRM, signal.SIG_DFL
    )  # the handler inherited from the parent would raise
    signal.alarm(limit)  # ends a child that waits forever
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
    """Run the command `kcache` in a forked child, which is faster than a new interpreter.

    Args:
        words: the arguments of the command.
        environ: variables that the child sets.
        before: a function that the child calls before it runs the command.
        mixed: whether standard error is written into the output, as on a terminal.
    """
    from kcache.cli import app  # noqa: F401  # so that no child has to import it

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
    logging.getLogger().handlers.clear()  # remove pytest's handlers
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
    """Run `work` in a forked child, and assert that it succeeds."""
    assert wait(fork(work)) == 0


def become_nobody() -> None:
    """Change this process's user to `NOBODY`, if the process is root."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """Set the umask for the block."""
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


@contextmanager
def nobodys_directory() -> Iterator[Path]:
    """Yield a new directory that the user `NOBODY` owns and can reach."""
    with tempfile.TemporaryDirectory(prefix="kcache-nobody-") as name:
        os.chmod(name, 0o755)
        cache = Path(name) / "cache"
        cache.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(cache, NOBODY, NOBODY)
        yield cache


def has_ended(process: int) -> bool:
    """Wait for at most a minute; return whether a process has ended. It need not be a child."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 60)[0])
    finally:
        os.close(descriptor)


def wait(pid: int) -> int:
    """Wait for a child; return its exit code, or minus the signal's number if one killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


#: The end of a program that sets `begun` when `use`, executed in a thread, is in the middle of a
#: slow step. It forks there, and executes `use` in the child, too, which must not wait for ever.
FORK_DURING_USE = """
thread = threading.Thread(target=exec, args=(use, globals()))
thread.start()
assert begun.wait(60)
pid = os.fork()
if not pid:
    signal.alarm(60)
    exec(use)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
thread.join()
"""
