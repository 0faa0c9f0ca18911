"""Output: decides which output of a compile is meant, and which file it is written to."""

from __future__ import annotations

import os
import shutil
import sys

import click

from kcache.cli.terminal import naming, write_stdout
from kcache.util.open_file import replacing

__all__ = ["OUTPUTS", "OutputPath", "named_by_suffix", "refuse_terminal", "write_output"]

OUTPUTS = ("cubin", "ptx", "ltoir")


class OutputPath(click.Path):
    """The name of a file to write. An empty name, as from an unset variable, is refused."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        if value == "":
            self.fail("'' is not allowed; allowed: a file, or - for standard output", param, ctx)
        return super().convert(value, param, ctx)


def named_by_suffix(output: str | None) -> str | None:
    """Return which of `OUTPUTS` the suffix of a path names, or None."""
    suffix = os.path.splitext(output or "")[1].removeprefix(".").lower()
    return suffix if suffix in OUTPUTS else None


def refuse_terminal(emit: str) -> None:
    """Refuse to write anything but text to a terminal.

    Raises:
        UsageError: standard output is one.
    """
    if emit != "ptx" and sys.stdout is not None and sys.stdout.isatty():  # pyright: ignore
        raise click.UsageError(
            f"{emit.upper()} is binary and would garble the terminal. Pass -o OUT."
        )


def write_output(data: bytes, output: str) -> None:
    """Write `data` to the file `output`, or to standard output for `-`; all of it or nothing.

    A file is replaced at once and keeps its permissions. A device or a pipe is written to.

    Raises:
        OSError: it can't be written; it names the file, which is as it was.
    """
    if output == "-":
        write_stdout(data)
        return
    target = os.path.realpath(output)
    with naming(output):
        if os.path.exists(target) and not os.path.isfile(target):
            with open(target, "wb") as device:
                device.write(data)
            return
        with replacing(target) as draft:
            with open(draft, "wb") as file:
                file.write(data)
            if os.path.exists(target):
                shutil.copymode(target, draft)
