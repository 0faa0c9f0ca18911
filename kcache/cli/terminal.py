"""Terminal: writes results to standard output, and everything else to standard error.

A name can't print control characters or markup: unprintable characters are shown escaped.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, TextIO

import click

from kcache.util.open_file import replacing
from kcache.util.units import plain

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

#: The names of the standard streams in messages.
STDIN, STDOUT = "standard input", "standard output"
#: How many digits of a key a message shows.
SHORT = 12
#: The outputs of a kernel that a command can write.
OUTPUTS = ("cubin", "ptx", "ltoir")
#: If a task takes longer than this many seconds, its progress is shown. A hit takes a few
#: milliseconds.
_PATIENCE = 0.2
#: Names the option `--json` in the context of a command.
_JSON = "kcache.json"
#: The width of a table that is not for a terminal: no line is ever cut or folded.
_UNLIMITED = 1_000_000


# -- texts -----------------------------------------------------------------------------------------


def notify(message: str) -> None:
    """Write one line to standard error, after the name of the program."""
    click.echo(f"kcache: {plain(message)}", err=True)


def show_log(log: str) -> None:
    """Write a compiler's log to standard error."""
    click.echo(plain(log, "\n\t"), err=True)


def note_json(context: click.Context, _: click.Parameter, value: bool) -> None:
    """Note whether a command was given the option `--json`."""
    context.meta[_JSON] = value


def wants_json() -> bool:
    """Return whether the running command was given the option `--json`."""
    return bool(click.get_current_context().meta.get(_JSON))


def show(
    text: str | Callable[[], str | Table], record: object = None, *, err: bool = False
) -> None:
    """Write the result of a command: `record` as JSON with the option `--json`, else the text.

    A table is as wide as the terminal, and coloured unless NO_COLOR is set.

    Args:
        text: of one line or several, or a function that returns it or a table; empty for nothing.
        record: the result for JSON; if it is None, nothing is written with `--json`.
        err: write to standard error.
    """
    if wants_json():
        shown = "" if record is None else json.dumps(record, indent=2)
    else:
        made = text if isinstance(text, str) else text()
        shown = plain(made, "\n") if isinstance(made, str) else _rendered(made, colours=True)
    if shown:
        with naming(STDOUT):
            click.echo(shown, err=err, color=True)  # Rich has left out colours that are not wanted


def write_stdout(data: bytes) -> None:
    """Write bytes to standard output, to the end."""
    with naming(STDOUT):
        stream = binary(sys.stdout, STDOUT)
        stream.write(data)
        stream.flush()


def read_stdin() -> bytes:
    """Return everything that comes through standard input."""
    with naming(STDIN):
        return binary(sys.stdin, STDIN).read()


def binary(stream: TextIO | None, name: str) -> BinaryIO:
    """Return a standard stream for bytes; raises OSError if it was closed before Python started."""
    if stream is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), name)
    return stream.buffer


@contextmanager
def naming(path: str) -> Generator[None]:
    """Name the file in errors of reading or writing."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def can_ask() -> bool:
    """Return whether the user can be asked: the question goes to standard error."""
    return _is_terminal(sys.stdin) and _is_terminal(sys.stderr)


def width() -> int | None:
    """Return the width of the terminal, or None if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if _is_terminal(sys.stdout) else None


def _is_terminal(stream: object) -> bool:
    return bool(stream and stream.isatty())  # type: ignore[attr-defined]  # pyright: ignore


# -- files ---------------------------------------------------------------------------------------


def named_by_suffix(output: str | None) -> str | None:
    """Return which of `OUTPUTS` the suffix of a path names, or None."""
    suffix = os.path.splitext(output or "")[1].removeprefix(".").lower()
    return suffix if suffix in OUTPUTS else None


def refuse_terminal(emit: str) -> None:
    """Refuse to write anything but text to a terminal.

    Raises:
        UsageError: standard output is a terminal, and `emit` is not PTX.
    """
    if emit != "ptx" and sys.stdout is not None and sys.stdout.isatty():  # pyright: ignore
        raise click.UsageError(f"{emit.upper()} is binary. Pass -o OUT.")


def write_output(data: bytes, output: str) -> str:
    """Write `data` to the file `output`, or to standard output for `-`; all of it or nothing.

    An existing file is replaced atomically, and the new one gets its permissions. A device or a
    pipe is written to. Returns the output's name for messages.

    Raises:
        OSError: the file can't be written, and is unchanged; the error names it.
    """
    if output == "-":
        write_stdout(data)
        return STDOUT
    target = os.path.realpath(output)
    with naming(output):
        if os.path.exists(target) and not os.path.isfile(target):
            with open(target, "wb") as device:
                device.write(data)
            return output
        with replacing(target) as draft:
            with open(draft, "wb") as file:
                file.write(data)
            if os.path.exists(target):
                shutil.copymode(target, draft)
    return output


# -- tables ----------------------------------------------------------------------------------------


def columns(rows: Iterable[tuple[str, ...]], *, fit: bool = False) -> str:
    """Return rows of text in aligned columns, two spaces apart.

    Args:
        rows: at least one row; all have the same length.
        fit: cut the last column where a line would be longer than the terminal.
    """
    from rich.table import Table  # noqa: PLC0415  28 ms
    from rich.text import Text  # noqa: PLC0415

    table = Table.grid(padding=(0, 2, 0, 0))
    # One row, in whose cells each line is one of `rows`: Rich takes 0.4 ms for each row.
    cells = [
        Text("\n".join(map(plain, column)), no_wrap=True) for column in zip(*rows, strict=True)
    ]
    for number in range(len(cells)):
        table.add_column(no_wrap=number < len(cells) - 1, overflow="ellipsis")
    table.add_row(*cells)
    return _rendered(table, fit=fit)


def _rendered(table: Table, *, fit: bool = True, colours: bool = False) -> str:
    """Return the text of a table, as wide as the terminal, without spaces at line ends."""
    from rich.console import Console  # noqa: PLC0415

    # Not to standard output: Rich ends the process if its reader has gone.
    file = io.StringIO()
    room = width() if fit else None
    terminal = colours and _is_terminal(sys.stdout)
    Console(file=file, width=room or _UNLIMITED, force_terminal=terminal).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


# -- progress --------------------------------------------------------------------------------------


@contextmanager
def progress(title: str, total: int | None = None) -> Generator[Callable[..., None]]:
    """Show the progress of the block on a terminal if it takes a while; erase it at the end.

    Yields a function to call after each step, or with a number of steps. Any thread may call it.

    Args:
        title: what is being done.
        total: number of steps; with None, only the time is shown.
    """
    display = _display(total) if _is_terminal(sys.stderr) else None
    if display is None:
        yield lambda *_: None
        return
    task = display.add_task(plain(title), total=total)
    timer = threading.Timer(_PATIENCE, display.start)
    timer.daemon = True
    timer.start()
    try:
        yield partial(display.advance, task)
    finally:
        timer.cancel()
        timer.join()
        display.stop()


def _display(total: int | None) -> Progress | None:
    """Return a progress line on standard error; None if the terminal can't erase it."""
    from rich import progress as rich  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415

    console = Console(stderr=True)
    if not console.is_interactive:  # TERM=dumb
        return None
    return rich.Progress(
        rich.SpinnerColumn("dots" if console.encoding.startswith("utf") else "line"),
        rich.TextColumn("{task.description}", markup=False),
        *(() if total is None else (rich.BarColumn(), rich.MofNCompleteColumn())),
        rich.TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


@contextmanager
def interruptible(farewell: Callable[[], str] = str) -> Generator[None]:
    """End the process at once if the block is interrupted; print `farewell()`, if any, last.

    The interpreter's own exit would wait for the compiles that have begun.
    """
    try:
        yield
    except KeyboardInterrupt:
        with suppress(OSError):
            if last := farewell():
                notify(last)
        os._exit(130)
