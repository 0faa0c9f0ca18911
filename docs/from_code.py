"""Writes the tables of the reference that come from the code: `python docs/from_code.py`.

A page marks such a table by two comments, which no reader sees:

    <!-- from the code: environment -->
    ...
    <!-- end -->

What stands between them is Markdown, so a checkout and the site show the same. A test compares it
with what this module makes, so no page drifts from what kcache does. `--check` writes nothing and
exits with 1 if a page is not up to date.

`command` is not called here, but by the directive of this name, when Sphinx builds the site.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence

import click
from from_code_markdown import (
    PART,
    REFERENCE,
    first_paragraph,
    items,
    plain,
    sections,
    table,
)
from man_page import MAN_PAGE, man_page

from kcache.admin.info import counter_name, exposition
from kcache.backend import Usage
from kcache.cli.app import app as cli
from kcache.config import VARIABLES, Variable
from kcache.engine.stats import FIELDS, Stats
from kcache.util.units import format_size

__all__ = ["MAN_PAGE", "command", "man_page", "updated"]

#: Endings of the names of fields that are no plain counts.
_UNITS = {"seconds": "seconds", "_ms": "milliseconds", "bytes_evicted": "bytes", "_rate": "0 to 1"}


def updated(text: str) -> str:
    """Returns a page with every part made anew."""

    def made(found: re.Match[str]) -> str:
        body = "\n".join(PARTS[found[2]](*found[3].split())).strip("\n")
        return f"{found[1]}\n{body}\n\n{found[4]}"

    return PART.sub(made, text)


# -- settings ------------------------------------------------------------------------------------


def environment() -> Iterator[str]:
    """The environment variables, from `kcache.config.VARIABLES`."""
    rows = [("variable", "allowed", "default", "meaning")]
    for variable in VARIABLES:
        default = "" if variable.default is None else _default(variable)
        allowed = variable.allowed.replace("``", "`")
        rows.append((f"`{variable.name}`", allowed, default, plain(variable.meaning)))
    yield from table(rows)


def _default(variable: Variable) -> str:
    """Returns a default as one would write it into the environment; a size also in words."""
    if isinstance(variable.default, bool):
        return f"`{int(variable.default)}`"
    size = variable.setting.endswith("_size") and isinstance(variable.default, int)
    return f"`{variable.default}`" + (f" ({format_size(variable.default)})" if size else "")


# -- commands ------------------------------------------------------------------------------------


def _commands() -> Iterator[tuple[str, click.Command, click.Context]]:
    """Yields name, command and context of each command, in the order of `kcache --help`."""
    # With the settings of the real command, because click keeps the help option that it makes here.
    with click.Context(cli, info_name="kcache", **cli.context_settings) as parent:
        for name in cli.list_commands(parent):
            command = cli.get_command(parent, name)
            assert command is not None
            yield name, command, click.Context(command, parent=parent, info_name=name)


def command(wanted: str, *part: str) -> Iterator[str]:
    """One command: what it does, how it is called, every option with its meaning and default.

    Of a command that has commands, a table of these; `part` names one of them.
    """
    ((name, found, context),) = (entry for entry in _commands() if entry[0] == wanted)
    for each in part:
        assert isinstance(found, click.Group)
        inner = found.get_command(context, each)
        assert inner is not None
        name, found = f"{name} {each}", inner
        context = click.Context(found, parent=context, info_name=each)
    if not isinstance(found, click.Group):  # its commands are listed below
        yield f"Usage: `{' '.join(('kcache', name, *found.collect_usage_pieces(context)))}`"
    for paragraph in inspect.cleandoc(found.help or "").split("\n\n"):
        yield from ("", plain(paragraph))
    if isinstance(found, click.Group):
        parts = [(each, found.get_command(context, each)) for each in found.list_commands(context)]
        rows = [("command", "does")]
        for each, inside in parts:
            said = "" if inside is None else plain(inside.get_short_help_str(limit=200))
            rows.append((f"`kcache {name} {each}`", said.removesuffix(".")))
        yield from ("", *table(rows))
    rows = [("option", "meaning")]
    for param in found.get_params(context):
        record = None if isinstance(param, click.Argument) else param.get_help_record(context)
        known = _EVERYWHERE | (_of_compile() if name == "why" else set())
        if record is not None and not known & set(param.opts):
            spelled, said = record
            rows.append((_spelling(param, spelled), _meaning(said)))
    if len(rows) > 1:
        yield from ("", *table(rows))


#: The options that the page explains once, at its top.
_EVERYWHERE = {"--help", "--json", "--directory"}


def _of_compile() -> set[str]:
    """Returns the options of `kcache compile`, which `kcache why` takes, too."""
    ((_, found, context),) = (entry for entry in _commands() if entry[0] == "compile")
    return {opt for param in found.get_params(context) for opt in param.opts}


def _spelling(param: click.Parameter, spelled: str) -> str:
    """Returns the spellings of an option, each with the value that follows the last of them."""
    _, _, value = spelled.rpartition(", ")[2].partition(" ")
    value = value.replace("INTEGER RANGE", "N")
    return ", ".join(f"`{f'{opt} {value}'.rstrip()}`" for opt in sorted(param.opts, key=len))


def _meaning(said: str) -> str:
    """Returns an option's help; default and bounds, which click appends, in words."""
    text, _, notes = said.partition("  [")
    notes = notes.removesuffix("]").replace("]  [", "; ").replace("<=x<=", " to ")
    notes = re.sub(r"x>=(\d+)", r"\1 or more", notes)
    return plain(text) + (f" *({plain(notes)})*" if notes else "")


# -- statistics ----------------------------------------------------------------------------------


def unit(name: str) -> str:
    """Returns the unit of a field of the statistics."""
    return next((text for end, text in _UNITS.items() if name.endswith(end)), "number")


def statistics() -> Iterator[str]:
    """The fields of `Stats`: those that are counted, and those that are derived."""
    said = items(sections(Stats)["Attributes"])
    rows = [("field", "unit", "meaning", "in Prometheus")]
    for name in FIELDS:
        metric = f"`kcache_{counter_name(name)}_total`"
        rows.append((f"`{name}`", unit(name), plain(said[name]), metric))
    derived = [name for name, kind in vars(Stats).items() if isinstance(kind, property)]
    for name in derived:
        about = plain(first_paragraph(getattr(Stats, name)))
        rows.append((f"`{name}`", unit(name), about, ""))
    yield from table(rows)


def metrics() -> Iterator[str]:
    """The metrics of `kcache stats --prometheus` that are no field of `Stats`."""
    about = dict.fromkeys(("version", "directory", "backend"), "")
    text = exposition(Stats(), Usage(0, 0), 0, about)
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    rows = [("metric", "type", "meaning")]
    for name, said in re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE):
        if kinds[name] == "gauge":
            rows.append((f"`{name}`", kinds[name], plain(said)))
    yield from table(rows)


def remotes() -> Iterator[str]:
    """The schemes of addresses, and the options that each of them takes."""
    from kcache.remote.address import COMMON, KINDS, OPTIONS

    rows: list[Sequence[str]] = [("kind", "addresses begin with", "own options")]
    for kind in dict.fromkeys(KINDS.values()):
        schemes = ", ".join(f"`{scheme}://`" for scheme, each in KINDS.items() if each == kind)
        options = ", ".join(f"`{name}`" for name in sorted(OPTIONS[kind]))
        rows.append((f"`{kind}`", schemes, options))
    yield from table(rows)
    yield ""
    yield f"Every address takes {', '.join(f'`{name}`' for name in sorted(COMMON))}."


PARTS: dict[str, Callable[..., Iterator[str]]] = {
    "environment": environment,
    "statistics": statistics,
    "metrics": metrics,
    "remotes": remotes,
}


def main() -> int:
    """Write every page that is not up to date; with `--check`, only tell which."""
    parser = argparse.ArgumentParser(description="Write what the reference takes from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 on drift")
    check: bool = parser.parse_args().check
    old = 0
    for page in (*sorted(REFERENCE.glob("*.md")), MAN_PAGE):
        text = page.read_text(encoding="utf-8") if page.exists() else ""
        new = man_page() if page == MAN_PAGE else updated(text)
        if new != text:
            old += 1
            print(f"{page.name}: {'is not up to date' if check else 'written'}")
            if not check:
                page.write_text(new, encoding="utf-8")
    return 1 if check and old else 0


if __name__ == "__main__":
    sys.exit(main())
