"""`kcache path`: prints the directory of the cache."""

from __future__ import annotations

import os

import click

from kcache.cli.open_cache import load_settings, named_directory
from kcache.cli.options import directory_option
from kcache.cli.terminal import write_stdout

__all__ = ["path"]


@click.command(short_help="Print the directory of the cache.")
@directory_option
def path(*, directory: str | None) -> None:
    """Print the directory that programs and commands use as the cache, whether it exists or not."""
    load_settings(directory)  # this warns
    write_stdout(os.fsencode(named_directory(directory)) + b"\n")
