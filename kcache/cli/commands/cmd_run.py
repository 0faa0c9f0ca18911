"""`kcache run`: runs a program, and answers its NVRTC and nvcc compiles from the cache."""

from __future__ import annotations

import os
from contextlib import suppress

import click

from kcache.cli.open_cache import named_directory
from kcache.cli.parameters import directory_option, flag
from kcache.directory import open_directory
from kcache.dropin.run import run as run_command
from kcache.errors import BackendError
from kcache.warm.recording import refuse_other_file


def _recording(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
    """Refuse a file that can't be recorded into: only the server would log that."""
    if path is not None:
        folder = os.path.dirname(os.path.abspath(path))
        if not (os.path.lexists(path) or os.access(folder, os.W_OK | os.X_OK)):
            raise click.BadParameter(f"{path!r} can't be written; expected a writable file.")
        refuse_other_file(os.path.abspath(path))
    return path


@click.command(
    short_help="Run a program; answer NVRTC and nvcc from the cache.",
    context_settings={"allow_interspersed_args": False},
)
@flag("--stats", help="At the end, print one line: hits, misses and which programs compiled.")
@flag("--why", help="For each compile, print one line: a hit, or the reason for a miss.")
@click.option(
    "--record",
    type=click.Path(dir_okay=False, writable=True),
    callback=_recording,
    metavar="LIST",
    help="Record every requested kernel in the file LIST, for kcache warm.",
)
@directory_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    *, stats: bool, why: bool, record: str | None, directory: str | None, command: tuple[str, ...]
) -> None:
    """Run COMMAND, and answer its NVRTC and nvcc compiles from the cache.

    When the program or one of its child processes looks for NVRTC, it finds kcache's library. This
    library behaves like NVRTC, and calls the real NVRTC for everything that the cache can't answer.
    The program keeps its exit status, its signals and its terminal.
    """
    if directory is not None:  # a value that is given as an option has to be right
        with suppress(BackendError):
            open_directory(named_directory(directory), read_only=True)
    code = run_command(command, stats=stats, why=why, record=record, directory=directory)
    raise click.exceptions.Exit(code)
