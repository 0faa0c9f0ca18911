"""Terminal: writes results to standard output, and everything else to standard error."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import click

from kcache.util.units import counted

if TYPE_CHECKING:
    from rich.live import Live
    from rich.progress import Progress, TaskID

__all__ = [
    "STDOUT",
    "Bar",
    "can_ask",
    "cells",
    "columns",
    "counted",
    "cut",
    "fit",
    "log_to_stderr",
    "naming",
    "plain",
    "progress",
    "read_stdin",
    "say",
    "show",
    "spinner",
    "width",
    "working",
    "write_stdout",
]

T = TypeVar("T")

#: Its name in messages.
STDOUT = "standard output"
#: If a task takes longer than this many seconds, its progress is shown. A hit takes a few
#: milliseconds.
_PATIENCE = 0.2
#: Frames of the spinner per second.
_FRAMES = 10


def say(message: str) -> None:
    """Write one line to standard error, after the name of the program."""
    click.echo(f"kcache: {message}", err=True)


@contextmanager
def naming(path: str) -> Generator[None]:
    """Name the file in errors of reading or writing."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def show(text: str) -> None:
    """Write a result, one line or several, to standard output."""
    with naming(STDOUT):
        click.echo(text)


def write_stdout(data: bytes) -> None:
    """Write bytes to standard output, to the end."""
    with naming(STDOUT):
        if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def read_stdin() -> bytes:
    """Return everything that comes through standard input."""
    with naming("standard input"):
        if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return sys.stdin.buffer.read()


def columns(rows: Iterable[tuple[str, ...]]) -> str:
    """Return rows of text in aligned columns, two spaces apart, the last one of any width."""
    table = list(rows)
    widths = [max(map(cells, column)) for column in zip(*table, strict=True)]
    widths[-1:] = [0]
    return "\n".join(
        "  ".join(
            text + " " * (width - cells(text)) for text, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in table
    )


def cells(text: str) -> int:
    """Return how many columns a terminal shows a printable text in."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width  # only where a name needs it

    return sum(
        0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text
    )


def cut(text: str, room: int, *, keep_end: bool = False) -> str:
    """Return a text that fits the given columns, with dots if it is cut.

    With `keep_end`, the dots stand in its middle.
    """
    if cells(text) <= room:
        return text
    dots = "…" if (sys.stdout.encoding or "").lower().startswith("utf") else "..."
    left = max(0, room - len(dots))
    end = _head(text[::-1], left // 2)[::-1] if keep_end else ""
    return (_head(text, left - cells(end)) + dots + end)[: max(0, room)]


def _head(text: str, room: int) -> str:
    """Return as much of the beginning of a text as fits."""
    for position, char in enumerate(text):
        room -= cells(char)
        if room < 0:
            return text[:position]
    return text


def plain(text: str) -> str:
    """Return text that is safe for a terminal: unprintable characters are escaped."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def width() -> int | None:
    """Return the width of the terminal that standard output is, or None if it is none."""
    return shutil.get_terminal_size().columns if _is_terminal(sys.stdout) else None


def fit(text: str) -> str:
    """Return lines of text cut to the width of the terminal; whole lines without one."""
    columns = width()
    if columns is None:
        return text
    return "\n".join(cut(line, columns) for line in text.splitlines())


def can_ask() -> bool:
    """Return whether a question can be asked, which goes to standard error."""
    return _is_terminal(sys.stdin) and _is_terminal(sys.stderr)


def log_to_stderr() -> None:
    """Make the library's warnings look like the command's own messages."""
    log = logging.getLogger("kcache")
    if any(handler.get_name() == "kcache" for handler in log.handlers):
        return
    handler = _Handler()
    handler.set_name("kcache")  # the logger whose level `KCACHE_LOG` sets
    log.addHandler(handler)


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {record.getMessage()}")


@contextmanager
def spinner(title: str) -> Generator[None]:
    """Show a spinner, `title` and the elapsed seconds while the block runs, on a terminal only."""
    if not _is_terminal(sys.stderr):
        yield
        return
    with _live(title):
        yield


def working(
    title: str,
    work: Callable[[], T],
    display: AbstractContextManager[object] | None = None,
    *,
    farewell: Callable[[], str] = str,
) -> T:
    """Return what `work` returns, with a spinner, or `display`, if it takes a while.

    An interrupt ends the process at once: NVRTC can't be stopped, and can take a minute. Then the
    text that `farewell` returns, if any, is printed last.
    """
    with _interrupts_held() as interrupted:
        job = _Job(work)
        try:
            job.wait(_PATIENCE)
            if not job.done:
                with spinner(title) if display is None else display:
                    while not job.done:
                        job.wait(1 / _FRAMES)
                        if interrupted():
                            raise KeyboardInterrupt
        except KeyboardInterrupt:
            with suppress(OSError):
                if last := farewell():
                    say(last)
            # Not through the interpreter's exit: it would unload libraries that the compile still
            # uses.
            os._exit(130)
    return job.result()


@contextmanager
def _interrupts_held() -> Generator[Callable[[], bool]]:
    """Block SIGINT in this thread and those that it starts; yield a test whether one has come.

    While NVRTC 12 compiles, it handles SIGINT by ending the process with exit code 4.
    """
    if sys.platform == "win32":
        yield lambda: False
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield lambda: signal.SIGINT in signal.sigpending()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Job(Generic[T]):
    """Work in its own thread, so that the main thread can draw and be interrupted."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kcache-work", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # re-raised in the main thread
            self._error = error

    def wait(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._results[0]


def _live(title: str) -> Live:
    """Return a line with a spinner, `title` and the elapsed seconds, erased at the end."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True)
    unicode = console.encoding.startswith("utf")
    dots = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏" if unicode else "-\\|/"
    started = time.monotonic()

    def line() -> Text:
        seconds = time.monotonic() - started
        elapsed = f" {seconds:.1f} s"
        text = Text(title, overflow="ellipsis" if unicode else "crop", no_wrap=True)
        text.truncate(max(1, console.width - len(elapsed) - 5))  # room for ^C in the same line
        dot = dots[int(seconds * _FRAMES) % len(dots)]
        return Text.assemble((f"{dot} ", "green"), text, (elapsed, "cyan"))

    return Live(
        get_renderable=line,
        console=console,
        refresh_per_second=_FRAMES,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _is_terminal(stream: object) -> bool:
    return bool(stream and stream.isatty())  # type: ignore[attr-defined]  # pyright: ignore


#: The width of the bar itself in columns, at most.
_WIDEST = 60
#: How many columns stay free at the end of the line, as room for ^C.
_SPARE = 3


class Bar:
    """A line on standard error while the block runs: title, bar, count, and the time left.

    It draws nothing if standard error is no terminal. Threads: any thread may call `show`, also
    before the block.
    """

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._drawn: tuple[Progress, TaskID] | None = None

    @property
    def done(self) -> int:
        """How many of the total are done."""
        return self._done

    def show(self, done: int) -> None:
        """Show that `done` of the total are done."""
        self._done = done
        if self._drawn is not None:
            progress, task = self._drawn
            progress.update(task, completed=done)

    def step(self) -> None:
        """Show that one more is done. One thread only."""
        self.show(self._done + 1)

    def __enter__(self) -> Self:
        """Draw the bar."""
        if _is_terminal(sys.stderr):
            progress = _progress(self._title, self._total)
            progress.start()
            task = progress.add_task(self._title, total=self._total, completed=self._done)
            self._drawn = progress, task
        return self

    def __exit__(self, *_: object) -> None:
        """Erase it."""
        if self._drawn is not None:
            self._drawn[0].stop()


@contextmanager
def progress(title: str, total: int) -> Generator[Callable[[], None]]:
    """Show a bar while the block runs; yield a function that advances it by one."""
    with Bar(title, total) as bar:
        yield bar.step


def _progress(title: str, total: int) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    console = Console(stderr=True)
    texts = len(title) + len(f" {total}/{total} 0:00:00 ")
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(min(_WIDEST, max(1, console.width - texts - _SPARE))),
        MofNCompleteColumn(),
        Remaining(compact=True),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
