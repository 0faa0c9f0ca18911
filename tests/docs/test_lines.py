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
    told = [f"{page}:{n}: {said}" for n, line in quoted(PAGES[page]) if (said := check(line))]
    assert told == []


@pytest.mark.parametrize("module", MODULES)
def test_a_docstring_quotes_commands_that_exist(module: str) -> None:
    found = docstrings(MODULES[module])
    assert [f"{module}:{n}: {said}" for n, line in found if (said := check(line))] == []


def check(line: str) -> str | None:
    return complaint(line, app)


@pytest.mark.parametrize(
    "line",
    [
        "kcache --version",
        "kcache COMMAND --help",
        "kcache trim --older-than 30d --dry-run",
        "kcache compile FILE [--arch ARCH] [-D NAME[=VALUE]]... [--emit cubin|ptx|ltoir]",
        "kcache compile a.cu -DN=1 -I. --option=-ftz=true",
        "kcache warm -j8 list.toml # --nonsense",
        "KCACHE_LOG=debug kcache ls | grep --nonsense x",
        ".venv/bin/tox -e cu13 -- --nonsense",
        "kcache run pytest --nonsense",
        "kcache server status --json",
        "tox -e full",
        "python bench/ratios.py --only x",
        "pytest tests/docs/test_lines.py::test",
        "kcache.KernelCache(nonsense)",
        "kcache-cuda --nonsense",
    ],
)
def test_what_exists_is_right(line: str) -> None:
    assert check(line) is None


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("kcache nonsense", "no command kcache nonsense"),
        ("python -m kcache nonsense", "no command"),
        ("kcache run --nonsense pytest", "kcache run has no option --nonsense"),
        ("kcache server nonsense", "no command kcache server nonsense"),
        ("kcache server stop --json", "kcache stop has no option --json"),
        ("kcache trim [--older-then AGE]", "no option --older-then"),
        ("tox -e nonsense", "no environment nonsense"),
        ("tox -e type,py399", "no environment py399"),
        ("python bench/nonsense.py", "no bench/nonsense.py"),
    ],
)
def test_what_does_not_exist_is_told(line: str, told: str) -> None:
    assert told in str(check(line))
