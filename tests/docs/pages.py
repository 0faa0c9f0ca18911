"""Pages: reads the blocks of the documentation's pages, and the marks before these blocks.

A mark is an HTML comment on a line before a block. `test_blocks.py` describes each mark.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

#: The words after `test:` in a mark. They decide how a block is tested.
HOW = ("exit", "gpu", "slow", "by", "dockerfile", "workflow", "none")
#: Matches the parts that `docs/from_code.py` writes. They are not read here, because
#: `test_reference.py` compares them.
_MADE = re.compile(r"^<!-- from the code: .*?^<!-- end -->$", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"<!--\s*(file|test):\s*(.*?)\s*-->")
_DIRECTIVES = ("{doctest}", "{literalinclude}")
#: Directives that contain no code.
_SILENT = ("{command}", "{eval-rst}", "{toctree}")
_PARSER = MarkdownIt()


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        page: path of the page, relative to the repository, with forward slashes.
        line: number of the line with the opening fence, from 1.
        language: the first word after the fence, in lower case, or an empty text if there is none;
            `doctest` and `literalinclude` for these directives.
        text: the content of the block, with a line break at the end.
        file: the name of the file to which the content is written, or None.
        marks: how the block is tested: maps the word of each mark to the text after it.
        follows: whether there are only marks between the previous block and this one.
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


def pages() -> list[Path]:
    """Return the paths of all pages for users: at the root, in docs/ and in examples/."""
    built = DOCS / "_build"
    names = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")
    found = [
        *(ROOT / name for name in names),
        *sorted(path for path in DOCS.rglob("*.md") if built not in path.parents),
        *sorted(ROOT.glob("examples/*/README.md")),
    ]
    assert len(found) > 10
    return found


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def blocks(path: Path) -> list[Block]:
    """Return the blocks of a page, in the order of the page."""
    page = named(path) if path.is_relative_to(ROOT) else path.name
    text = _MADE.sub(lambda made: "\n" * made[0].count("\n"), path.read_text(encoding="utf-8"))
    found: list[Block] = []
    marks: list[tuple[str, str]] = []
    follows = False
    for token in _PARSER.parse(text):
        if token.type == "html_block" and (noted := _MARK.findall(token.content)):
            marks += noted
        elif token.map and (token.type == "fence" or token.content):
            language = _language(token.info) if token.type == "fence" else None
            where = (page, token.map[0] + 1)
            if language is not None:
                found.append(_made(where, language, token.content, marks, follows=follows))
            else:
                assert not marks, f"{where}: no block follows the mark before this line"
            marks, follows = [], language is not None
    assert not marks, f"{page}: no block follows the mark at the end"
    return found


def _language(info: str) -> str | None:
    """Return a block's language, or None for a directive that contains no code."""
    word = (info.split() or [""])[0].lower()
    assert not word.startswith("{") or word in (*_DIRECTIVES, *_SILENT), f"not supported: {word}"
    return None if word in _SILENT else word.strip("{}")


def _made(
    where: tuple[str, int], language: str, text: str, marks: list[tuple[str, str]], *, follows: bool
) -> Block:
    file = None
    how: dict[str, str] = {}
    for kind, rest in marks:
        word, _, what = rest.partition(" ")
        if kind == "file":
            file = rest
        else:
            assert word in HOW, f"{where}: expected one of {', '.join(HOW)}, got {word!r}"
            how[word] = what.strip()
    return Block(*where, language, text, file, how, follows)


def spans(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each piece of code in the prose, outside of blocks."""
    for token in _PARSER.parse(text):
        for child in token.children or ():
            if child.type == "code_inline" and token.map:
                yield token.map[0] + 1, child.content.strip()


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line that is not in a block."""
    fences = [token.map for token in _PARSER.parse(text) if token.type == "fence"]
    inside = {number for lines in fences if lines for number in range(*lines)}
    for number, line in enumerate(text.splitlines()):
        if number not in inside:
            yield number + 1, line
