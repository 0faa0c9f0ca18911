"""Probes: the names that a compile may ask `__has_include` for, read off its texts.

A macro can hold the operator, a part of its operand, or both. What can't be followed is told, since
the compiler leaves no trace of a header that it asked for and did not find.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kcache.nvrtc.macros import Macros
from kcache.nvrtc.scan import (
    DEFINE,
    GAP,
    Macro,
    expand,
    operand_of,
    plain_text,
)
from kcache.nvrtc.search import Include

__all__ = ["probes"]

_PROBED = GAP + rb'(<[^>\n]*>|"[^"\n]*"|[^\n)]*)'
_CONDITION = re.compile(GAP + rb"(?:#|%:)" + GAP + rb"(?:el)?if\b", re.DOTALL)
_WORD_FOLLOWS = re.compile(GAP + rb"\w", re.DOTALL)
_ASKED = re.compile(rb"\bdefined[ \t]*\(?[ \t]*\Z")
#: Bytes before a word in which such a question would stand.
_BEFORE = 40
#: A `#` before a definition, or the end of a comment that it may lie before.
_DEFINING = re.compile(rb"(?:#|%:|\*/).*\bdefine\b")
_NAME = re.compile(r"[A-Za-z_]\w*")
_WORD = re.compile(rb"[A-Za-z_]\w*")
_OPERATORS = (("__has_include", False), ("__has_include_next", True))


class _Word(NamedTuple):
    """The operator, or a macro that leads to it.

    Attributes:
        name: as it is written.
        onward: whether it is `__has_include_next`.
        macro: what a use of the macro has for an operand; None where that is what stands in the
            parentheses.
    """

    name: str
    onward: bool
    macro: Macro | None = None


def probes(texts: Mapping[str, bytes]) -> tuple[set[tuple[str | None, Include]], bool]:
    """Return every operand of `__has_include` in the texts, and whether that is all of them.

    `texts` maps names of files to their spliced text; an operand is given with its file, or with
    None where it stands in a macro, which can be used in any file. Follows macros that wrap the
    operator, such as `#define HAS(x) __has_include(<x>)`, and macros that wrap those. False says
    that some operand is made in another way.
    """
    return _Search(texts).run()


class _Search:
    """One search through the texts."""

    def __init__(self, texts: Mapping[str, bytes]) -> None:
        self._texts = texts
        self._found: set[tuple[str | None, Include]] = set()
        self._complete = True
        self._pending = [_Word(name, onward) for name, onward in _OPERATORS]
        self._seen = set(self._pending)
        self._macros = Macros(texts.values())

    def run(self) -> tuple[set[tuple[str | None, Include]], bool]:
        while self._pending:
            word = self._pending.pop()
            raw = word.name.encode()
            uses = re.compile(
                rb"(?<!\w)" + raw + rb"(?!\w)(?:" + GAP + rb"\(" + _PROBED + rb")?", re.DOTALL
            )
            for name, text in self._texts.items():
                if raw in text:
                    for match in uses.finditer(text):
                        self._use(word, name, text, match)
        return self._found, self._complete

    def _use(self, word: _Word, name: str, text: bytes, match: re.Match[bytes]) -> None:
        """Take up one place in a text where a word stands."""
        line, defines = _line_around(text, match.start())
        if not defines:
            if match[1] is not None:
                self._add(name, word, match[1], in_macro=False)
            # else `#ifdef __has_include`, `defined(__has_include)`, or a macro follows
            elif _CONDITION.match(line) and _WORD_FOLLOWS.match(text, match.end()):
                self._complete = False
            return
        definition = DEFINE.match(line.lstrip())
        if definition is None:
            self._complete = False
        elif definition[1].decode() != word.name:  # else the definition of the wrapper itself
            self._defined(word, definition, text, match)

    def _defined(
        self, word: _Word, definition: re.Match[bytes], text: bytes, match: re.Match[bytes]
    ) -> None:
        """Take up a word in the definition of a macro."""
        name = definition[1].decode()
        if match[1] is None:
            if definition[2] is None and plain_text(definition[3]) == word.name:
                self._follow(_Word(name, word.onward, word.macro))  # another name for it
            elif not _ASKED.search(text[max(0, match.start() - _BEFORE) : match.start()]):
                self._complete = False
            return
        parameters = plain_text(definition[2] or b"").strip("()").split(",")
        names = tuple(each.strip() for each in parameters)
        operand = plain_text(match[1])
        if set(_NAME.findall(operand)).isdisjoint(names):
            self._add(None, word, match[1], in_macro=True)
        else:
            body = operand if word.macro is None else f"{word.name}({operand})"
            self._follow(_Word(name, word.onward, Macro(names, body)))

    def _follow(self, word: _Word) -> None:
        if word not in self._seen:
            self._seen.add(word)
            self._pending.append(word)

    def _add(self, where: str | None, word: _Word, raw: bytes, *, in_macro: bool) -> None:
        """Add what an operand can be; within a macro, and as its argument, it is expanded."""
        literal: set[Include] = set()
        computed: set[str] = set()
        operand_of(raw, literal, computed, onward=word.onward)
        exact = not in_macro and (word.name, word.onward) in _OPERATORS
        if literal and (exact or not self._may_expand(word, raw)):
            self._found |= {(where, include) for include in literal}
            return
        text = plain_text(raw)
        if text:
            expanded = self._expanded(text if word.macro is None else f"{word.name}({text})")
            self._complete = self._complete and expanded is not None
            found = (each._replace(next=word.onward) for each in expanded or ())
            self._found |= {(where, include) for include in found}

    def _may_expand(self, word: _Word, raw: bytes) -> bool:
        """Tell whether a literal operand may become another: by a wrapper, or by a macro in it."""
        wrapper = word.macro
        if wrapper is not None and wrapper.parameters != (wrapper.body,):
            return True
        return raw[:1] == b"<" and not self._macros.names.isdisjoint(_WORD.findall(raw))

    def _expanded(self, operand: str) -> Iterable[Include] | None:
        return expand(operand, self._definitions())

    def _definitions(self) -> Macros:
        """Return all macros; those that wrap the operator as if they were its operand."""
        wrappers: dict[str, list[Macro]] = {}
        for word in self._seen:
            if word.macro is not None:
                wrappers.setdefault(word.name, []).append(word.macro)
        return self._macros.beside(wrappers) if wrappers else self._macros


def _line_around(text: bytes, at: int) -> tuple[bytes, bool]:
    """Return the line on which position `at` lies, and whether a macro may be defined there."""
    start = text.rfind(b"\n", 0, at) + 1
    end = text.find(b"\n", at)
    line = text[start : end if end >= 0 else len(text)]
    return line, _DEFINING.search(text[start:at]) is not None
