"""Every test that a page names as evidence is there, and is a test."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from docs.pages import ROOT, named

from docs import pages

PAGES = {named(path): path for path in pages.pages()}
#: `tests/x.py::name`, `tests/x.py::Class::name`; of a marked block, too.
_TEST = re.compile(r"\b((?:tests|examples)/[\w/.-]+\.py)((?:::\w+)+)")
_FILE = re.compile(r"`((?:tests|bench)/[\w/.-]*\w/?)`")
#: A file that the page has its reader write.
_OWN = re.compile(r"^<!-- file: (\S+) -->$", re.M)


@cache
def defined(file: Path) -> frozenset[str]:
    """Returns `name` and `Class::name` of everything that is defined in a file."""
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inside = (each for each in node.body if isinstance(each, ast.FunctionDef))
            found.update(f"{node.name}::{each.name}" for each in inside)
    return frozenset(found)


def missing(text: str) -> list[str]:
    """Returns what a text names of the repository and what is not there."""
    own = _OWN.findall(text)
    named_files = (path for path in _FILE.findall(text) if path not in own)
    lacking = [path for path in named_files if not (ROOT / path).exists()]
    for file, names in _TEST.findall(text):
        name = names.removeprefix("::")
        there = (ROOT / file).is_file() and name in defined(ROOT / file)
        if not there or not name.rpartition("::")[2].startswith("test_"):
            lacking.append(f"{file}::{name}")
    return lacking


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_cites_is_there(page: str) -> None:
    assert missing(PAGES[page].read_text(encoding="utf-8")) == []
