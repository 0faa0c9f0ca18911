"""Texts: decides whether a text may use the time or a path.

This is the only place where kcache looks at C++. In doubt, both answers are yes. If a text may use
the macros of the clock, the kernel is not cached. If a text may use the name of a file, or has an
absolute path, the kernel is good for one location until a second compile has proven more. Nothing
else in a text matters, because the compiler's questions tell.

A compile of CUB reads 7 MB in 670 files. So four searches are enough for the usual file.
"""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet

__all__ = ["NAMES", "PATHS", "asks_clock", "flags_of"]

#: The text contains an absolute path, or is otherwise known to depend on where directories lie.
PATHS = 1
#: The text may use the name of a file: `__FILE__`, `std::source_location` and similar. Such a name
#: is the include directory as it was spelled, and the rest of the path (seen with 12.4 to 13.5).
NAMES = 8
#: The text has one of the clock's macros: `__DATE__`, `__TIME__`, `__TIMESTAMP__`.
_CLOCK = 2
#: The text has a part of one that `##` may complete, such as `ME__`, or `TIME` beside a lone `__`.
_PART = 4

_CLOCKS = (b"__DATE__", b"__TIME__", b"__TIMESTAMP__")
_FILES = (b"__FILE__", b"__BASE_FILE__")
#: Words from which `##` can make one of them.
_PIECES = frozenset(
    name[start:end]
    for name in (*_CLOCKS, *_FILES)
    for start in range(len(name))
    for end in range(start + 1, len(name) + 1)
)
_WORDS = re.compile(rb"\b[A-Z_]+\b")
#: The first piece of a name has two underscores and a letter, unless the underscores are a word of
#: their own.
_FIRST = re.compile(
    rb"__(?:T(?:I(?:M(?:E(?:_|S(?:T(?:A(?:M(?:P_?)?)?)?)?)?)?)?)?|D(?:A(?:T(?:E_?)?)?)?"
    rb"|FI(?:L(?:E_?)?)?|BA(?:S(?:E(?:_(?:F(?:I(?:L(?:E_?)?)?)?)?)?)?)?)\b"
)
#: Words with a letter that may be the last piece of one of the names, and all these names. (The
#: search for a pattern that begins with a letter is as fast as memchr. A look at the next character
#: first halves the time.)
_LAST_E = re.compile(
    b"E(?![A-Za-z0-9])(?:%b)_{0,2}\\b"
    % b"|".join(
        b"(?<=(?<![A-Za-z0-9])%b)" % piece
        for piece in b"E ME TE LE IME ATE ILE TIME DATE FILE".split()
    )
)
_LAST_P = re.compile(
    b"P(?![A-Za-z0-9])(?:%b)_{0,2}\\b"
    % b"|".join(
        b"(?<=(?<![A-Za-z0-9])%b)" % b"TIMESTAMP"[start:] for start in range(len("TIMESTAMP"))
    )
)
#: The compiler's own `assert` contains `__FILE__`, which `#` may turn into a text. It calls one of
#: two functions, which a text may define as macros.
_ASSERT = re.compile(rb"assert(?:(?<=\bassert)\b|_?fail)")
#: Matches an absolute path: a slash at the beginning of a word that is no comment and no division.
_PATH = re.compile(rb"/(?<=[\s\"'<(=,]/)[\w.~#]")
#: Matches a line that is continued within a word.
_SPLICE = re.compile(rb"\\(?:(?<=\w\\)|(?<=\?\?/))[ \t]*\r?\n")
_JOINS = re.compile(rb"(?:\\|\?\?/)[ \t]*\r?\n")


def flags_of(text: bytes) -> int:
    """Return what a text may use, as flags that can be joined with those of other texts."""
    if _SPLICE.search(text) or b"??/" in text:
        text = _JOINS.sub(b"", text)
    flags = PATHS if _PATH.search(text) else 0
    if b"source_location" in text or _ASSERT.search(text):
        flags |= NAMES
    if _LAST_E.search(text) or _LAST_P.search(text) or _FIRST.search(text):
        flags |= _words(text)
    return flags


def asks_clock(flags: int) -> bool:
    """Tell whether texts with these flags together may make the outcome depend on the time."""
    return bool(flags & (_CLOCK | _PART))


def _words(text: bytes) -> int:
    flags = NAMES if b"FILE" in text else 0
    if any(name in text for name in _CLOCKS):
        flags |= _CLOCK
    glues = b"##" in text or b"%:%:" in text
    # Single letters are usually template parameters.
    words = {w for w in _WORDS.findall(text) if w in _PIECES and (glues or len(w) > 1 or w == b"_")}
    if any(_can_be_glued(name, words) for name in _CLOCKS):
        flags |= _PART
    if any(_can_be_glued(name, words) for name in _FILES):
        flags |= NAMES
    return flags


def _can_be_glued(name: bytes, words: AbstractSet[bytes]) -> bool:
    """Tell whether `##` may make a name of words, some of which may be in other texts."""
    if any(word in name and word != name and _is_telling(word) for word in words):
        return True
    ends = {0}
    for end in range(1, len(name) + 1):
        if any(name[start:end] in words for start in ends if end - start < len(name)):
            ends.add(end)
    return len(name) in ends


def _is_telling(word: bytes) -> bool:
    """Tell whether a word is most likely a piece of a macro's name: `__TI`, `ME_`, `E__`."""
    letters = len(word.replace(b"_", b""))
    return 0 < letters < len(word) and len(word) > 2
