"""Pages of the documentation, as a test sees them: their blocks, and the marks before these.

A mark is an HTML comment on a line before a block. `test_blocks.py` says what each one means.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

#: Marks that say how a block is tested: the words after `test:`.
HOW = ("exit", "gpu", "slow", "by", "dockerfile", "workflow", "none")
#: The page that `docs/from_code.py` writes. Its blocks are signatures, which `test_reference.py`
#: compares.
_MADE = re.compile(r"^<!-- from the code: .*?^<!-- end -->$", re.DOTALL | re.MULTILINE)
#: Directives that hold text with blocks of its own; those that hold none; and doctests.
_NESTING = {"admonition", "caution", "dropdown", "important", "note", "seealso", "tip", "warning"}
_SILENT = {"contents", "figure", "image", "toctree"}
_CODE = {"code", "code-block", "sourcecode"}

_FENCE = re.compile(r"^( *)(`{3,}|~{3,}|:{3,})[ ]*([^`]*)$")
_COMMENT = re.compile(r"^ *<!--\s*(.*?)\s*-->\s*$")
_MARK = re.compile(r"(file|test):\s*(.*)")
_DIRECTIVE = re.compile(r"\{([\w:-]+)\}\s*(.*)")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        page: relative to the repository, with forward slashes.
        line: of the opening fence, from 1.
        language: the first word after the fence, in lower case; `doctest` and `literalinclude`
            stand for these directives, and an empty text for nothing.
        text: what is in it, with a line break at the end.
        file: the name that it is to be written to, or None.
        marks: how it is to be tested: word -> what follows.
        follows: whether nothing but marks stands between the block before it and this one.
    """

    page: str
    line: int
    language: str
    text: str
    file: str | None
    marks: dict[str, str]
    follows: bool

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


class PageError(AssertionError):
    """Something on a page that no test can make sense of, with its place."""


def pages() -> list[Path]:
    """Returns every page that people read: at the root, in docs/ and beside the examples."""
    built = DOCS / "_build"
    found = [
        *(
            ROOT / name
            for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")
        ),
        *sorted(path for path in DOCS.rglob("*.md") if built not in path.parents),
        *sorted(ROOT.glob("examples/*/README.md")),
    ]
    assert len(found) > 10
    return found


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> list[Block]:
    """Returns the blocks of a page in order."""
    name = named(path) if path.is_relative_to(ROOT) else path.name
    text = _MADE.sub(lambda made: "\n" * made[0].count("\n"), path.read_text(encoding="utf-8"))
    return list(_blocks(name, text.splitlines(), 0))


def _blocks(page: str, lines: list[str], before: int) -> Iterator[Block]:
    marks: list[tuple[str, str]] = []
    follows = False
    at = 0
    while at < len(lines):
        line, number = lines[at], before + at + 1
        at += 1
        opening = _FENCE.match(line)
        if opening is None:
            comment = _COMMENT.match(line)
            mark = _MARK.fullmatch(comment[1]) if comment else None
            if mark:
                marks.append((mark[1], mark[2]))
            elif line.strip():
                _refuse_strays(page, number, marks)
                marks, follows = [], False
            continue
        start = at
        closing = re.compile(rf"^ *{re.escape(opening[2])}{re.escape(opening[2][0])}*\s*$")
        while at < len(lines) and not closing.match(lines[at]):
            at += 1
        if at == len(lines):
            raise PageError(f"{page}:{number}: the block does not end")
        inside = [text.removeprefix(opening[1]) for text in lines[start:at]]
        at += 1
        language, nested = _language(page, number, opening[3])
        if nested:
            yield from _blocks(page, inside, before + start)
        if language is None:
            _refuse_strays(page, number, marks)
            marks, follows = [], False
            continue
        yield _made(page, number, language, "".join(f"{text}\n" for text in inside), marks, follows)
        marks, follows = [], True
    _refuse_strays(page, before + len(lines), marks)


def _language(page: str, line: int, info: str) -> tuple[str | None, bool]:
    """Returns a block's language, None for what is no code, and whether it holds blocks."""
    directive = _DIRECTIVE.match(info)
    if directive is None:
        words = info.split()
        return (words[0].lower() if words else ""), False
    name = directive[1]
    if name in _CODE:
        return directive[2].lower(), False
    if name in ("doctest", "literalinclude"):
        return name, False
    if name in _NESTING or name in _SILENT:
        return None, name in _NESTING
    raise PageError(f"{page}:{line}: no test knows the directive {name}")


def _made(
    page: str, line: int, language: str, text: str, marks: list[tuple[str, str]], follows: bool
) -> Block:
    file = None
    how: dict[str, str] = {}
    for kind, rest in marks:
        if kind == "file":
            file = rest
            continue
        word, _, what = rest.partition(" ")
        if word not in HOW:
            raise PageError(f"{page}:{line}: {word!r} is no mark; there are: {', '.join(HOW)}")
        how[word] = what.strip()
    return Block(page, line, language, text, file, how, follows)


def _refuse_strays(page: str, line: int, marks: list[tuple[str, str]]) -> None:
    if marks:
        raise PageError(f"{page}:{line}: the mark before this line belongs to no block")


# -- what stands in the text ---------------------------------------------------------------------


def spans(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each piece of code in the prose, outside of blocks."""
    for number, line in prose(text):
        for _, span in re.findall(r"(`+)(.+?)\1(?!`)", line):
            yield number, span.strip()


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yields the lines outside of blocks, with their numbers. A span that wraps is joined."""
    fence: str | None = None
    pending, began = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        found = _FENCE.match(line)
        if fence is not None:
            if found and found[2].startswith(fence) and not found[3].strip():
                fence = None
            continue
        if found:
            if pending:
                yield began, pending
                pending = ""
            fence = found[2]
            continue
        if pending and not line.strip():
            yield began, pending
            pending = ""
        joined = f"{pending} {line.strip()}" if pending else line
        began = began if pending else number
        if joined.count("`") % 2:
            pending = joined
        else:
            pending = ""
            yield began, joined
    if pending:
        yield began, pending
