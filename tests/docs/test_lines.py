"""What a page quotes exists: each command with its options, and each test that the page names.

No test runs a command line like `kcache trim --older-than AGE`. Still, its command and its options
have to exist, and so do the environments of `tox -e` and the files of `python bench/...`.
"""

import ast
import configparser
import itertools
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from docs.pages import ROOT, blocks, named, pages, spans

click = pytest.importorskip("click", reason="the extra cli is not installed")
pytest.importorskip("rich", reason="the extra cli is not installed")

from kcache.cli.app import app  # noqa: E402

PAGES = {named(path): path for path in (*pages(), ROOT / "CHANGELOG.md")}

_KCACHE = re.compile(
    r"^(?:[A-Z_]+=\S+ )*(?:\$ )?(?:\.venv/bin/kcache|python3? -m kcache|kcache)(?: |$)"
)
_TOX = re.compile(r"^(?:\$ )?(?:\.venv/bin/)?tox(?: |$)")
_PYTHON = re.compile(
    r"^(?:\$ )?(?:\.venv/bin/)?(?:python3?|pytest)(?: -\S+)* ((?:bench|tests)/\S*)"
)
#: Matches the end of a line that does not belong to the command: pipes, redirections and so on.
_END = re.compile(r"\s(?:\||>|<|&&|\|\||;|#).*$")
#: The notation for optional parts, repetition and alternatives.
_NOTATION = re.compile(r"[\[\]{}]|\.\.\.|…")


def complaint(line: str, app: click.Group) -> str | None:
    """Return what is wrong with a command line of `kcache`, tox or Python, or None."""
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
            if words[0].isupper():  # COMMAND stands for any command
                return None
            command = app.get_command(context, words.pop(0).lower())
        if command is None:
            return f"there is no command kcache {text.split(maxsplit=1)[0]}"
        if isinstance(command, click.Group) and words and not words[0].startswith("-"):
            part = words.pop(0)
            command = command.get_command(context, part) or command
            if isinstance(command, click.Group):
                return f"there is no command kcache {command.name} {part}"
        words = list(itertools.takewhile(lambda w: w != "--", words))
        if command.name == "run":  # the words after a program's name belong to that program
            words = list(itertools.takewhile(lambda w: w.startswith("-"), words))
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
    """Yield the lines of a block of shell commands. Continued lines are joined."""
    for line in re.sub(r"\\\n\s*", "", script).splitlines():
        yield line.strip()


def quoted(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each command line that a page quotes."""
    yield from spans(path.read_text(encoding="utf-8"))
    for block in blocks(path):
        if block.language in ("sh", "bash", "console"):
            yield from ((block.line, line) for line in command_lines(block.text))


def test_commands_that_are_quoted_exist() -> None:
    told = [
        f"{name}:{n}: {said}"
        for name, path in PAGES.items()
        for n, line in quoted(path)
        if (said := complaint(line, app))
    ]
    assert told == []


# -- tests and files -------------------------------------------------------------------------------

#: Matches `tests/x.py::name` and `tests/x.py::Class::name`, also in the mark of a block.
_CITED_TEST = re.compile(r"\b((?:tests|examples)/[\w/.-]+\.py)((?:::\w+)+)")
_CITED_FILE = re.compile(r"`((?:tests|bench)/[\w/.-]*\w/?)`")
#: Matches the mark of a block that the reader writes into a file.
_OWN = re.compile(r"^<!-- file: (\S+) -->$", re.M)


@cache
def defined(file: Path) -> frozenset[str]:
    """Return each `name` and `Class::name` that a file defines."""
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inside = (each for each in node.body if isinstance(each, ast.FunctionDef))
            found.update(f"{node.name}::{each.name}" for each in inside)
    return frozenset(found)


def missing(text: str) -> list[str]:
    """Return the files and tests of the repository that a text names, but that do not exist."""
    own = _OWN.findall(text)
    named_files = (path for path in _CITED_FILE.findall(text) if path not in own)
    lacking = [path for path in named_files if not (ROOT / path).exists()]
    for file, names in _CITED_TEST.findall(text):
        name = names.removeprefix("::")
        there = (ROOT / file).is_file() and name in defined(ROOT / file)
        if not there or not name.rpartition("::")[2].startswith("test_"):
            lacking.append(f"{file}::{name}")
    return lacking


def test_what_a_page_cites_is_there() -> None:
    lacking = {page: missing(path.read_text(encoding="utf-8")) for page, path in PAGES.items()}
    assert {page: names for page, names in lacking.items() if names} == {}
