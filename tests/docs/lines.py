"""Command lines as prose quotes them, checked against the commands that there are.

`kcache trim --older-than AGE` is a command line that nothing runs. Still its command and its options
have to exist, and what `tox -e` or `python bench/...` names, too.
"""

from __future__ import annotations

import configparser
import itertools
import re
import shlex
from collections.abc import Iterator

import click
from docs.pages import ROOT

_KCACHE = re.compile(
    r"^(?:[A-Z_]+=\S+ )*(?:\$ )?(?:\.venv/bin/kcache|python3? -m kcache|kcache)(?: |$)"
)
_TOX = re.compile(r"^(?:\$ )?(?:\.venv/bin/)?tox(?: |$)")
_PYTHON = re.compile(
    r"^(?:\$ )?(?:\.venv/bin/)?(?:python3?|pytest)(?: -\S+)* ((?:bench|tests)/\S*)"
)
#: The rest of a line that a shell would interpret is no part of the command.
_END = re.compile(r"\s(?:\||>|<|&&|\|\||;|#).*$")
#: Notation: optional parts, repetition, alternatives.
_NOTATION = re.compile(r"[\[\]{}]|\.\.\.|…")


def complaint(line: str, app: click.Group) -> str | None:
    """Returns what is wrong with a command line, or None; what is none of these is right."""
    if _KCACHE.match(line):
        return _kcache(_KCACHE.sub("", line), app)
    if _TOX.match(line):
        return _tox(_TOX.sub("", line))
    named = _PYTHON.match(line)
    if named and not (ROOT / named[1].partition("::")[0]).exists():
        return f"there is no {named[1]}"
    return None


def _words(text: str) -> list[str]:
    text = _NOTATION.sub(" ", _END.sub("", f" {text}").strip())
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _kcache(text: str, app: click.Group) -> str | None:
    words = _words(text)
    if not words:
        return None
    with click.Context(app, **app.context_settings) as context:  # click remembers the help option
        command: click.Command | None = app
        if not words[0].startswith("-"):
            if words[0].isupper():  # COMMAND stands for any
                return None
            command = app.get_command(context, words.pop(0).lower())
        if command is None:
            return f"there is no command kcache {text.split(maxsplit=1)[0]}"
        if isinstance(command, click.Group) and words and not words[0].startswith("-"):
            part = words.pop(0)
            command = command.get_command(context, part) or command
            if isinstance(command, click.Group):
                return f"there is no command kcache {command.name} {part}"
        if command.name == "run":  # the words after a program's name belong to that program
            words = list(itertools.takewhile(lambda w: w.startswith("-") and w != "--", words))
        known = {opt for p in command.get_params(context) for opt in (*p.opts, *p.secondary_opts)}
    for word in words:
        option = word.partition("=")[0] if word.startswith("--") else word
        if option.startswith("-") and len(option) > 1 and not _known(option, known):
            return f"kcache {command.name} has no option {option}"
    return None


def _known(option: str, known: set[str]) -> bool:
    if option in known or option in ("-h", "--help"):
        return True
    return not option.startswith("--") and option[:2] in known  # -DN=1, -j8


def _tox(text: str) -> str | None:
    words = _words(text.partition(" -- ")[0])
    for flag, name in itertools.pairwise(words):
        if flag == "-e":
            for environment in name.split(","):
                if not _is_environment(environment):
                    return f"tox.ini has no environment {environment}"
    return None


def _is_environment(name: str) -> bool:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini", encoding="utf-8")
    return f"testenv:{name}" in parser or name in parser["tox"]["env_list"].split()


def command_lines(script: str) -> Iterator[str]:
    """Yields the lines of a block of shell commands, continued ones joined."""
    for line in re.sub(r"\\\n\s*", "", script).splitlines():
        yield line.strip()
