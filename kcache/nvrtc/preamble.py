"""Preamble: the part of a source that a precompiled header can be made of.

This module only decides what is tried. The compiler says whether it has used a precompiled header,
and the record tells what the header was made from.
"""

from __future__ import annotations

import re

from kcache.nvrtc.search import may_include

__all__ = ["preamble"]

_SPLICE = r"\\\r?\n"
_BLANK = re.compile(rf"(?:\s|{_SPLICE}|//(?:{_SPLICE}|[^\n])*+|/\*.*?\*/)*+", re.DOTALL)
#: Matches one directive to the end of its line. A comment that goes on in the next line is not part
#: of it.
_DIRECTIVE = re.compile(
    rf"(?:#|%:)(?:[ \t\f\v]|{_SPLICE}|/\*[^\n]*?\*/)*+([a-z_]+)"
    rf"((?:{_SPLICE}|/\*[^\n]*?\*/|//(?:{_SPLICE}|[^\n])*+|[^\n/]|/(?![/*]))*+)(?:\n|\Z)"
)
_OPENING = ("if", "ifdef", "ifndef")
_BETWEEN = ("elif", "elifdef", "elifndef", "else")
_FREE = ("include", "include_next", "define", "undef", "warning", "error")
#: Pragmas that do not affect the declaration after them.
_PRAGMA = re.compile(r"\s*(?:once|message|(?:nv_)?diag_\w+|GCC|clang)\b")


def preamble(source: str) -> int:
    """Return how many characters of a source can be precompiled: all its includes, no other code.

    It is 0 if the source includes nothing, or if it may include something after the first token
    outside a directive. In doubt, the preamble ends early: before anything that might end it for
    the compiler, also inside a branch.
    """
    end = at = depth = 0
    while True:
        blank = _BLANK.match(source, at)
        directive = _DIRECTIVE.match(source, at if blank is None else blank.end())
        if directive is None or (depth := _depth_after(directive, depth)) < 0:
            break
        at = directive.end()
        end = at if depth == 0 else end
    if "??" in source:  # a trigraph may hide a directive
        return 0
    return end if may_include(source[:end]) and not may_include(source[end:]) else 0


def _depth_after(directive: re.Match[str], depth: int) -> int:
    """Return the depth of conditionals after a directive; -1 if it does not belong here."""
    name = directive[1]
    if name in _OPENING:
        return depth + 1
    if name == "endif":
        return depth - 1
    if name in _BETWEEN:
        return depth or -1
    allowed = name in _FREE or (name == "pragma" and _PRAGMA.match(directive[2]) is not None)
    return depth if allowed else -1
