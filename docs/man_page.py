"""The manual page `kcache(1)`, made of the same texts as `kcache --help`.

`from_code.py` writes it to `docs/kcache.1`, as it writes the reference; the wheel installs it.
The format is man(7): https://man7.org/linux/man-pages/man7/man.7.html
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click
from from_code_markdown import REFERENCE

from kcache._version import __version__
from kcache.cli.app import app as cli
from kcache.config import VARIABLES

__all__ = ["MAN_PAGE", "man_page"]

MAN_PAGE = REFERENCE.parent / "kcache.1"


def man_page() -> str:
    """Returns the whole page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield '.\\" Written by docs/from_code.py.'
    yield f'.TH KCACHE 1 "" "kcache {__version__}" "kcache"'
    yield ".SH NAME"
    yield "kcache \\- compile CUDA kernels once"
    yield ".SH SYNOPSIS"
    yield ".B kcache"
    yield ".I COMMAND"
    yield "[options] [arguments]"
    yield ".SH DESCRIPTION"
    yield from _paragraphs(cli.help or "")
    yield ".SH COMMANDS"
    with click.Context(cli, info_name="kcache", **cli.context_settings) as parent:
        for name in cli.list_commands(parent):
            command = cli.get_command(parent, name)
            assert command is not None
            yield from _command(command, click.Context(command, parent=parent, info_name=name))
    yield ".SH ENVIRONMENT"
    for variable in VARIABLES:
        yield ".TP"
        yield f".B {_escaped(variable.name)}"
        yield _escaped(_one_line(variable.meaning))
    yield ".SH EXIT STATUS"
    yield "0 success; 1 failure; 2 wrong usage or configuration; 130 interrupted."
    yield ".SH SEE ALSO"
    yield "The documentation in the folder docs of the source."


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    usage = " ".join(command.collect_usage_pieces(context))
    yield f'.SS "{_escaped(context.command_path)} {_escaped(usage)}"'
    yield from _paragraphs(command.help or "")
    for option in command.get_params(context):
        record = option.get_help_record(context)
        if isinstance(option, click.Option) and record is not None:
            names, meaning = record
            yield ".TP"
            yield f".B {_escaped(_one_line(names))}"
            yield _escaped(_one_line(meaning)) or "\\&"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            each = command.get_command(context, name)
            assert each is not None
            yield from _command(each, click.Context(each, parent=context, info_name=name))


def _paragraphs(text: str) -> Iterator[str]:
    """Yields a docstring's paragraphs; one that click must not wrap stays in its lines."""
    for number, paragraph in enumerate(inspect.cleandoc(text).split("\n\n")):
        if number:
            yield ".PP"
        if paragraph.startswith("\b"):
            yield ".nf"
            yield from map(_escaped, paragraph.splitlines()[1:])
            yield ".fi"
        else:
            yield _escaped(_one_line(paragraph))


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _escaped(text: str) -> str:
    """Returns text as troff takes it: no line is a request, and a hyphen is what people type."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    text = text.replace("`", "\\`").replace("^", "\\(ha").replace("~", "\\(ti")
    return f"\\&{text}" if text[:1] in (".", "'") else text
