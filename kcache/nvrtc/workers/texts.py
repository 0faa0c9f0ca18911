"""Texts: decides whether a text may ask for the time, or for a path.

This is the only place where kcache looks at C++. In doubt, both answers are yes. If a text may use
the macros of the clock, the kernel is not cached. If a text may use the name of a file, or has an
absolute path, the kernel is good for one location until a second compile has proven more. Nothing
else in a text matters, because the compiler's questions tell.

A compile of CUB reads 7 MB in 670 files. So four searches are enough for the usual file.
"""

from __future__ import annotations

import re

__all__ = ["NAMES", "PATHS", "asks_clock", "flags_of"]

#: The text writes an absolute path, or is known otherwise to depend on where directories lie.
PATHS = 1
#: It may use the name of a file: `__FILE__`, `std::source_location` and their kin. Such a name is
#: the include directory as it was spelled, and what comes below it (seen with 12.4 to 13.5).
NAMES = 8
#: The text has one of the clock's macros: `__DATE__`, `__TIME__`, `__TIMESTAMP__`.
_CLOCK = 2
#: It has a part of one that `##` may complete, such as `ME__`, or `TIME` beside a lone `__`.
_PART = 4

_MACROS = (b"__DATE__", b"__TIME__", b"__TIMESTAMP__")
#: Whatever is of interest has one of these: all macros, and all last parts of them, end like this.
#: (A pattern that begins with a letter is looked for at the speed of memchr.)
_E = re.compile(rb"E(?:(?<=TIME)|(?<=DATE)|(?<=FILE)|(?<=ME)__|(?<=TE)__|(?<=LE)__|(?<=\WE)__)")
_MP = re.compile(rb"P(?<=MP)__")
#: Where a word ends that may be the last part of a macro's name; its last letters.
_LAST_PARTS = re.compile(rb"E__\b|P__\b")
#: The compiler's own `assert` has `__FILE__` in it, which `#` may make a text of, and calls one of
#: two functions, which a text may define as macros.
_ASSERT = re.compile(rb"assert(?:(?<=\bassert)\b|_?fail)")
_LAST_WORD = re.compile(rb"\w+\Z")
_LONGEST = len("__TIMESTAMP__") + 1
_WORD = re.compile(rb"\b_?(?:DATE|TIME|TIMESTAMP)_?\b")
_LONE = re.compile(rb"_\b(?<=\b_)|__\b(?<=\b__)")
#: An absolute path: a slash at the beginning of a word that is no comment and no division.
_PATH = re.compile(rb"/(?<=[\s\"'<(=,]/)[\w.~#]")
#: A line that is continued within a word.
_SPLICE = re.compile(rb"\\(?:(?<=\w\\)|(?<=\?\?/))[ \t]*\r?\n")
_JOINS = re.compile(rb"(?:\\|\?\?/)[ \t]*\r?\n")


def flags_of(text: bytes) -> int:
    """Return what a text may ask for, as flags that can be joined with those of other texts."""
    if _SPLICE.search(text) or b"??/" in text:
        text = _JOINS.sub(b"", text)
    flags = PATHS if _PATH.search(text) else 0
    if b"source_location" in text or _ASSERT.search(text):
        flags |= NAMES
    if _E.search(text) or _MP.search(text):
        flags |= _words(text)
    return flags


def asks_clock(flags: int) -> bool:
    """Tell whether texts with these flags together may make the outcome depend on the time."""
    return bool(flags & (_CLOCK | _PART))


def _words(text: bytes) -> int:
    flags = 0
    if b"FILE" in text:
        flags |= NAMES
    if any(name in text for name in _MACROS):
        flags |= _CLOCK
    for end in _LAST_PARTS.finditer(text):
        word = _LAST_WORD.search(text[max(0, end.end() - _LONGEST) : end.end()])
        if word is not None and _is_part(word[0], _MACROS):
            flags |= _PART
        if word is not None and _is_part(word[0], (b"__FILE__",)):
            flags |= NAMES
    # Harmless by itself, but `##` may put underscores before and behind it.
    for found in _WORD.finditer(text):
        if found[0].strip(b"_") != found[0] or _LONE.search(text):
            flags |= _PART
    return flags


def _is_part(word: bytes, macros: tuple[bytes, ...]) -> bool:
    """Tell whether a word with underscores at an end is a part of one of the macros."""
    bare = word.strip(b"_")
    return 0 < len(bare) < len(word) and any(word in name and word != name for name in macros)
