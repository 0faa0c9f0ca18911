"""`kcache extract`: writes a kernel's machine code or PTX to a file."""

from __future__ import annotations

import click

from kcache.cli.keys import SHORT, key_argument, open_entry
from kcache.cli.options import directory_option
from kcache.cli.output import (
    OUTPUTS,
    OutputPath,
    named_by_suffix,
    refuse_terminal,
    write_output,
)
from kcache.cli.terminal import STDOUT, say
from kcache.errors import BackendError, CorruptEntryError
from kcache.util.units import format_size

__all__ = ["extract"]


@click.command(short_help="Write a kernel's machine code or PTX to a file.")
@key_argument
@click.option(
    "--emit",
    type=click.Choice(OUTPUTS),
    help="The output to write.  [default: by the suffix of OUT, else the first of these that "
    "there is]",
)
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    type=OutputPath(),
    help="The file to write, - for standard output.  [default: the key's first digits, with the "
    "suffix of what is written]",
)
@directory_option
def extract(*, key: str, emit: str | None, output: str | None, directory: str | None) -> None:
    """Write the output of the entry KEY to a file, for `cuobjdump`, `nvdisasm` and other tools.

    KEY is the first digits of a key. `kcache ls` shows the keys.
    """
    item, entry = open_entry(directory, key)
    if entry is None:
        raise CorruptEntryError(f"entry {item.key[:SHORT]} is not used: {item.problem}")
    emit = emit or named_by_suffix(output) or next(filter(entry.payload.get, OUTPUTS), OUTPUTS[0])
    data = entry.payload.get(emit)
    if data is None:
        there = ", ".join(entry.payload) or "nothing"
        raise BackendError(f"{item.kind} {item.key[:SHORT]} has no {emit}; it has: {there}")
    if output is None:
        output = f"{item.key[:SHORT]}.{emit}"
    if output == "-":
        refuse_terminal(emit)
    write_output(data, output)
    shown = STDOUT if output == "-" else output
    say(f"{emit} of {item.source_name or item.key[:SHORT]} -> {shown} ({format_size(len(data))})")
