"""Directives whose contents come from the code: settings, commands, counts, errors.

What they say can't drift from what kcache does. Each makes reStructuredText, which Sphinx then
reads as if it stood on the page.
"""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import click
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

import kcache.errors
from kcache.admin.prometheus import _COUNTERS, exposition
from kcache.backend import Usage
from kcache.cli.app import app as cli
from kcache.config import VARIABLES, Variable
from kcache.engine.stats import FIELDS, Stats
from kcache.util.units import format_size

#: Fields whose numbers are no plain count, by the end of their names.
_UNITS = {"seconds": "seconds", "_ms": "milliseconds", "bytes_evicted": "bytes", "_rate": "0 to 1"}


def table(rows: Iterable[Sequence[str]], *, widths: str = "auto", name: str = "") -> list[str]:
    """Returns the lines of a table; the first row is its head."""
    lines = [".. list-table::", "   :header-rows: 1", f"   :widths: {widths}"]
    lines += [f"   :class: {name}"] if name else []
    lines.append("")
    for row in rows:
        lines += [f"   {'*' if n == 0 else ' '} - {cell}" for n, cell in enumerate(row)]
    return [*lines, ""]


def escaped(text: str) -> str:
    """Returns text as it is in reStructuredText, but for what stands between backticks: code."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([\\*|_])", r"\\\1", part) for part in parts[::2]]
    for n in range(1, len(parts), 2):
        parts[n] = f"``{parts[n]}``"
    return "".join(parts)


def attributes(of: type) -> dict[str, str]:
    """Returns what the docstring of a class says of each of its attributes."""
    text = inspect.getdoc(of) or ""
    _, _, section = text.partition("Attributes:\n")
    block = re.split(r"\n\n|\n(?=\S)", section, maxsplit=1)[0]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", block, re.MULTILINE)
    return {name: " ".join(about.split()) for name, about in found}


def first_paragraph(of: object) -> str:
    return " ".join((inspect.getdoc(of) or "").partition("\n\n")[0].split())


class Generated(SphinxDirective, ABC):
    """A directive that makes reStructuredText."""

    @abstractmethod
    def lines(self) -> Iterator[str]:
        """Yield the lines."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes("\n".join(self.lines()))


# -- settings ------------------------------------------------------------------------------------


class EnvironmentTable(Generated):
    """The environment variables, from `kcache.config.VARIABLES`."""

    def lines(self) -> Iterator[str]:
        rows = [("variable", "allowed", "default", "meaning")]
        for variable in VARIABLES:
            default = "" if variable.default is None else _default(variable)
            rows.append((f"``{variable.name}``", variable.allowed, default, variable.meaning))
        yield from table(rows, widths="26 24 14 36", name="environment")


def _default(variable: Variable) -> str:
    """Returns a default as one would write it into the environment; a size also in words."""
    if isinstance(variable.default, bool):
        return f"``{int(variable.default)}``"
    size = variable.setting.endswith("_size") and isinstance(variable.default, int)
    return f"``{variable.default}``" + (f" ({format_size(variable.default)})" if size else "")


# -- commands ------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, click.Command, click.Context]]:
    """Yields name, command and context of each command, in the order of `kcache --help`."""
    with click.Context(cli, info_name="kcache") as parent:
        for name in cli.list_commands(parent):
            command = cli.get_command(parent, name)
            assert command is not None
            yield name, command, click.Context(command, parent=parent, info_name=name)


class CommandTable(Generated):
    """Every command in a line."""

    def lines(self) -> Iterator[str]:
        rows = [("command", "does")]
        for name, command, context in commands():
            arguments = " ".join(command.collect_usage_pieces(context)[1:])
            said = escaped(command.get_short_help_str(limit=200)).removesuffix(".")
            rows.append((f"``kcache {name} {arguments}``".replace(" ``", "``"), said))
        yield from table(rows)


class CommandHelp(Generated):
    """One command: what it does, how it is called, every option with its meaning and default."""

    required_arguments = 1

    def lines(self) -> Iterator[str]:
        (found,) = (entry for entry in commands() if entry[0] == self.arguments[0])
        name, command, context = found
        usage = " ".join(("kcache", name, *command.collect_usage_pieces(context)))
        yield from (".. code-block:: text", "   :class: usage", "", f"   {usage}", "")
        for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
            yield from (escaped(" ".join(paragraph.split())), "")
        yield from (f".. program:: kcache {name}", "")
        if isinstance(command, click.Group):
            for part in command.list_commands(context):
                each = command.get_command(context, part)
                said = each.get_short_help_str(limit=200) if each is not None else ""
                yield from (f"``kcache {name} {part}``", f"   {escaped(said)}", "")
        for param in command.get_params(context):
            record = None if isinstance(param, click.Argument) else param.get_help_record(context)
            if record is None or "--help" in param.opts:
                continue
            spelled, said = record
            yield from (f".. option:: {_signature(param, spelled)}", "", f"   {_prose(said)}", "")


def _signature(param: click.Parameter, spelled: str) -> str:
    """Returns the spellings of an option, each with the value that follows the last of them."""
    _, _, value = spelled.rpartition(", ")[2].partition(" ")
    value = value.replace("INTEGER RANGE", "N")
    return ", ".join(f"{opt} {value}".rstrip() for opt in sorted(param.opts, key=len))


def _prose(said: str) -> str:
    """Returns an option's help; default and bounds, which click appends, in words."""
    text, _, notes = said.partition("  [")
    notes = notes.removesuffix("]").replace("]  [", "; ").replace("<=x<=", " to ")
    notes = re.sub(r"x>=(\d+)", r"\1 or more", notes)
    return escaped(text) + (f" *({escaped(notes)})*" if notes else "")


# -- statistics ----------------------------------------------------------------------------------


def unit(name: str) -> str:
    """Returns the unit of a field of the statistics."""
    return next((text for end, text in _UNITS.items() if name.endswith(end)), "number")


class StatisticsTable(Generated):
    """The fields of `Stats`: those that are counted, and those that are derived."""

    def lines(self) -> Iterator[str]:
        said = attributes(Stats)
        rows = [("field", "unit", "meaning", "in Prometheus")]
        for name in FIELDS:
            metric = f"``kcache_{_COUNTERS[name][0]}_total``"
            rows.append((f"``{name}``", unit(name), escaped(said[name]), metric))
        derived = [name for name, kind in vars(Stats).items() if isinstance(kind, property)]
        for name in derived:
            about = escaped(first_paragraph(getattr(Stats, name)))
            rows.append((f"``{name}``", unit(name), about, ""))
        yield from table(rows, widths="22 12 42 24", name="statistics")


class MetricTable(Generated):
    """The metrics of `kcache stats --prometheus` that are no field of `Stats`."""

    def lines(self) -> Iterator[str]:
        about = dict.fromkeys(("version", "directory", "backend"), "")
        text = exposition(Stats(), Usage(0, 0), 0, about)
        kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
        rows = [("metric", "type", "meaning")]
        for name, said in re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE):
            if kinds[name] == "gauge":
                rows.append((f"``{name}``", kinds[name], escaped(said)))
        yield from table(rows)


# -- errors --------------------------------------------------------------------------------------


class ErrorTree(Generated):
    """The hierarchy of the exceptions, as a nested list with their first sentences."""

    def lines(self) -> Iterator[str]:
        yield from self._below(kcache.errors.KcacheError, 0)

    def _below(self, kind: type[BaseException], depth: int) -> Iterator[str]:
        ours = kcache.errors.KcacheError
        others = [base.__name__ for base in kind.__bases__ if not issubclass(base, ours)]
        also = "" if kind is ours or not others else f" (also a ``{others[0]}``)"
        indent = "  " * depth
        said = escaped(first_paragraph(kind))
        yield from (f"{indent}- :py:exc:`~kcache.errors.{kind.__name__}`{also}: {said}", "")
        for name in kcache.errors.__all__:
            below = getattr(kcache.errors, name)
            parents = [base for base in below.__bases__ if issubclass(base, ours)]
            if parents and parents[0] is kind:
                yield from self._below(below, depth + 1)


def setup(app: Sphinx) -> ExtensionMetadata:
    app.add_directive("kcache-environment", EnvironmentTable)
    app.add_directive("kcache-commands", CommandTable)
    app.add_directive("kcache-command", CommandHelp)
    app.add_directive("kcache-statistics", StatisticsTable)
    app.add_directive("kcache-metrics", MetricTable)
    app.add_directive("kcache-errors", ErrorTree)
    return {"parallel_read_safe": True}
