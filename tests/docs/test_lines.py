"""Every command that is quoted, on a page or in a docstring, exists with its options."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs.pages import ROOT, blocks, named, pages, spans

click = pytest.importorskip("click", reason="the extra cli is not installed")
pytest.importorskip("rich", reason="the extra cli is not installed")

from docs.lines import command_lines, complaint  # noqa: E402

from kcache.cli.app import app  # noqa: E402

PAGES = {named(path): path for path in (*pages(), ROOT / "CHANGELOG.md")}
MODULES = {
    named(path): path
    for folder in ("kcache", "backends", "bench", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def quoted(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each command line that a page quotes."""
    yield from spans(path.read_text(encoding="utf-8"))
    for block in blocks(path):
        if block.language in ("sh", "bash", "console"):
            yield from ((block.line, line) for line in command_lines(block.text))


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each piece of code in the docstrings of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            line = getattr(node, "lineno", 1)
            for span in re.findall(r"`([^`]+)`", text):
                yield line, " ".join(span.split())


@pytest.mark.parametrize("page", PAGES)
def test_a_page_quotes_commands_that_exist(page: str) -> None:
    found = quoted(PAGES[page])
    assert [f"{page}:{n}: {said}" for n, line in found if (said := complaint(line, app))] == []


def test_docstrings_quote_commands_that_exist() -> None:
    told = [
        f"{module}:{n}: {said}"
        for module, path in MODULES.items()
        for n, line in docstrings(path)
        if (said := complaint(line, app))
    ]
    assert told == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("kcache nonsense", "no command kcache nonsense"),
        ("kcache run --nonsense pytest", "kcache run has no option --nonsense"),
        ("kcache server stop --json", "kcache stop has no option --json"),
        ("kcache trim [--older-then AGE]", "no option --older-then"),
        ("tox -e nonsense", "no environment nonsense"),
        ("python bench/nonsense.py", "no bench/nonsense.py"),
    ],
)
def test_what_does_not_exist_is_told(line: str, told: str) -> None:
    assert told in str(complaint(line, app))
