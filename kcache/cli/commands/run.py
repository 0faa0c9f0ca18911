"""`kcache run`: a program whose NVRTC is answered from the cache."""

from __future__ import annotations

import click

from kcache.cli.open_cache import directory_option

__all__ = ["run"]


@click.command(
    short_help="Run a program, its NVRTC answered from the cache.",
    context_settings={"allow_interspersed_args": False},
)
@click.option("--stats", is_flag=True, help="Print one line at the end: hits, misses, who asked.")
@directory_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(*, stats: bool, directory: str | None, command: tuple[str, ...]) -> None:
    """Run COMMAND, and have what it compiles with NVRTC answered from the cache.

    The program and its children find kcache's library where they look for NVRTC. It behaves as
    NVRTC does, and leaves to NVRTC what the cache can't answer. Exit status, signals and terminal
    are the program's own.
    """
    from kcache.dropin.run import run as run_command

    raise click.exceptions.Exit(run_command(command, stats=stats, directory=directory))
