"""Terminal: writes results to standard output, and everything else to standard error.

The names of files and kernels can't send control characters or markup to the terminal: unprintable
characters are shown escaped, and markup is shown as it is.
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
#: milliseconds, so it shows none.
_PATIENCE = 0.2
#: The key under which the context of a command records whether `--json` was passed.
_JSON = "kcache.json"
#: The width of a table that is not for a terminal, so large that no line is cut or folded.
_UNLIMITED = 1_000_000


# -- texts -----------------------------------------------------------------------------------------


def notify(message: str) -> None:
    """Write `message` as one line to standard error, after the name of the program."""
    click.echo(f"kcache: {plain(message)}", err=True)


def show_log(log: str) -> None:
    """Write a compiler's log to standard error."""
    click.echo(plain(log, "\n\t"), err=True)


def note_json(context: click.Context, _: click.Parameter, value: bool) -> None:
    """Record in the context of a command whether `--json` was passed."""
    context.meta[_JSON] = value


def wants_json() -> bool:
    """Return whether `--json` was passed to the running command."""
    return bool(click.get_current_context().meta.get(_JSON))


def show(
    text: str | Callable[[], str | Table], record: object = None, *, err: bool = False
) -> None:
    """Write the result of a command: `record` as JSON if `--json` was passed, else `text`.

    On a terminal, a table is as wide as the terminal, and coloured unless `NO_COLOR` is set.

    Args:
        text: one line or several lines, or a function that returns them or a table. Nothing is
            written if the text is empty.
        record: the result for JSON. If it is None, nothing is written with `--json`.
        err: whether to write to standard error instead of standard output.
    """
    if wants_json():
        shown = "" if record is None else json.dumps(record, indent=2)
    else:
        made = text if isinstance(text, str) else text()
        shown = plain(made, "\n") if isinstance(made, str) else _rendered(made, colours=True)
    if shown:
        with naming(STDOUT):
            click.echo(shown, err=err, color=True)  # Rich has left out unwanted colours


def write_stdout(data: bytes) -> None:
    """Write all of `data` to standard output, and flush it."""
    with naming(STDOUT):
        stream = binary(sys.stdout, STDOUT)
        stream.write(data)
        stream.flush()


def read_stdin() -> bytes:
    """Return all bytes of standard input, up to its end."""
    with naming(STDIN):
        return binary(sys.stdin, STDIN).read()


def binary(stream: TextIO | None, name: str) -> BinaryIO:
    """Return the binary buffer of the standard stream `stream`.

    Raises:
        OSError: the stream was closed before Python started.
    """
    if stream is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), name)
    return stream.buffer


@contextmanager
def naming(path: str) -> Generator[None]:
    """Replace each OSError of the block by one that names the file `path`."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def can_ask() -> bool:
    """Return whether the user can be asked: standard input and standard error are terminals."""
    return _is_terminal(sys.stdin) and _is_terminal(sys.stderr)


def width() -> int | None:
    """Return the width of the terminal, or None if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if _is_terminal(sys.stdout) else None


def _is_terminal(stream: object) -> bool:
    return bool(stream and stream.isatty())  # type: ignore[attr-defined]  # pyright: ignore


# -- files ---------------------------------------------------------------------------------------


def named_by_suffix(output: str | None) -> str | None:
    """Return the one of `OUTPUTS` that the suffix of the path `output` names, or None."""
    suffix = os.path.splitext(output or "")[1].removeprefix(".").lower()
    return suffix if suffix in OUTPUTS else None


def refuse_terminal(emit: str) -> None:
    """Raise an error if binary output would be written to a terminal.

    Raises:
        UsageError: standard output is a terminal, and `emit` is not `"ptx"`.
    """
    if emit != "ptx" and sys.stdout is not None and sys.stdout.isatty():  # pyright: ignore
        what = f"{emit.upper()} is binary, and standard output is a terminal"
        raise click.UsageError(f"{what}. Pass -o OUT.")


def write_output(data: bytes, output: str) -> str:
    """Write `data` to the file `output`, or to standard output if `output` is `-`.

    An existing file is replaced atomically, and the new file gets the permissions of the old one.
    A device or a pipe is not replaced but written to, so an error may leave a part of `data` in it.
    Returns the output's name for messages.

    Raises:
        OSError: `output` can't be written. The error names it. A regular file is unchanged.
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
        rows: at least one row; all rows have the same number of columns.
        fit: whether to cut the last column where a line would be longer than the terminal is wide.
    """
    from rich.table import Table  # noqa: PLC0415  28 ms
    from rich.text import Text  # noqa: PLC0415

    table = Table.grid(padding=(0, 2, 0, 0))
    # Rich takes 0.4 ms for each row. So the table has one row, whose cells have a line for each of
    # `rows`.
    cells = [
        Text("\n".join(map(plain, column)), no_wrap=True) for column in zip(*rows, strict=True)
    ]
    for number in range(len(cells)):
        table.add_column(no_wrap=number < len(cells) - 1, overflow="ellipsis")
    table.add_row(*cells)
    return _rendered(table, fit=fit)


def _rendered(table: Table, *, fit: bool = True, colours: bool = False) -> str:
    """Return the text of a table, without spaces at the ends of lines.

    Args:
        table: the table.
        fit: whether the text may not be wider than the terminal.
        colours: whether the text is coloured if standard output is a terminal.
    """
    from rich.console import Console  # noqa: PLC0415

    # Rich does not write to standard output itself: it would end the process if the pipe is closed.
    file = io.StringIO()
    room = width() if fit else None
    terminal = colours and _is_terminal(sys.stdout)
    Console(file=file, width=room or _UNLIMITED, force_terminal=terminal).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


# -- progress --------------------------------------------------------------------------------------


@contextmanager
def progress(title: str, total: int | None = None) -> Generator[Callable[..., None]]:
    """Show a progress line while the block runs, and erase the line at the end.

    The line is shown only on a terminal, and only if the block takes longer than `_PATIENCE`.
    Yields a function to call after each step, or after several steps with their number. The
    function may be called from several threads at the same time.

    Args:
        title: what is being done.
        total: the number of steps; if it is None, only the elapsed time is shown.
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
    """Return a progress line on standard error, or None if the terminal can't erase lines."""
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
    """If the block is interrupted, print the text of `farewell` and end the process with 130.

    The process ends at once, because the usual exit of the interpreter would wait for the compiles
    that have begun. If `farewell` returns an empty text, nothing is printed.
    """
    try:
        yield
    except KeyboardInterrupt:
        with suppress(OSError):
            if last := farewell():
                notify(last)
        os._exit(130)
