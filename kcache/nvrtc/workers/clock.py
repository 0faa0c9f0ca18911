"""Clock: tells whether texts may use the time of a compile, and makes up another time.

Every compile asks for the time, whatever it does with it. So where a text may use one of the
macros, a second compile at another time decides whether the outcome depends on it. What texts say
only decides whether there is a second compile. Single letters are the names of template parameters
everywhere. So D, I and M, of which each macro has one in its middle, count in a text that joins no
names itself only where other macros may join them on both sides: what stands beside them must be
the edge of an argument or of a macro, or something that may vanish.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterable

_MACROS = (b"__DATE__", b"__TIME__", b"__TIMESTAMP__")
#: The words from which `##` can make one of them, and these names.
_PIECES = frozenset(
    macro[start:end]
    for macro in _MACROS
    for start in range(len(macro))
    for end in range(start + 1, len(macro) + 1)
)
_NOT_A_WORD = bytes(n if bytes((n,)).isalnum() or n == ord("_") else ord(" ") for n in range(256))
#: The operator, its digraph and its trigraph.
_JOINS = (b"##", b"%:%:", b"??")
#: Beside one of these, which no macro makes vanish, a letter is not joined on that side.
_FIRM = rb"<>;*&=.:{}\[\]+!|~^-"
_LETTERS = {
    letter: re.compile(
        rb"%b(?!\w)(?<![\w%b]%b)(?<![%b] %b)[ \t]*(?:$|[^ \t%b])"
        % (letter, _FIRM, letter, _FIRM, letter, _FIRM),
        re.MULTILINE,
    )
    for letter in (b"D", b"I", b"M")
}
_LINE_ENDS = re.compile(rb"\\[ \t]*\r?\n")
#: Names, numbers, literals and comments.
_TOKENS = re.compile(
    rb"""[A-Za-z_$\x80-\xff][\w$\x80-\xff]*|\.?\d(?:'?[\w.])*"""
    rb"""|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|//[^\n]*|/\*.*?\*/""",
    re.DOTALL,
)
#: What makes it hard to tell where they begin and end.
_ODD = re.compile(rb"""R"|<[^>\n]*/\*|\\[ \t]+\r?\n|\r(?!\n)""")
_MOST_TEXTS = 65_536


class ClockTest:
    """Whether texts, taken together, may name one of the macros. Remembers texts by digest."""

    def __init__(self) -> None:
        self._pieces: dict[bytes, frozenset[bytes]] = {}

    def may_ask(
        self,
        files: Iterable[tuple[bytes, bytes]],
        code: Iterable[bytes] = (),
        texts: Iterable[bytes] = (),
    ) -> bool:
        """Tell it of files, which are digests and contents, of other code, and of other texts."""
        words = set[bytes]().union(*map(_pieces_of, code), *map(_words_of, texts))
        for digest, content in files:
            found = self._pieces.get(digest)
            if found is None:
                if len(self._pieces) >= _MOST_TEXTS:
                    self._pieces.clear()
                found = self._pieces[digest] = _pieces_of(content)
            words |= found
        if not words.isdisjoint(_MACROS):
            return True
        return b"##" in words and any(_can_be_joined(macro, words) for macro in _MACROS)


def _words_of(text: bytes) -> frozenset[bytes]:
    """Return the words of a text that may be pieces, and `##` if it joins words."""
    words = _PIECES.intersection(text.translate(_NOT_A_WORD).split())
    return words | {b"##"} if any(join in text for join in _JOINS) else words


def _pieces_of(code: bytes) -> frozenset[bytes]:
    """Return these words of a text without letters that it gives to no macro."""
    # Not each compiler joins lines by a trigraph, or with blanks behind the backslash.
    spliced = _LINE_ENDS.sub(b"", code.replace(b"??/", b"\\"))
    texts = {spliced, code}
    words = frozenset[bytes]().union(*map(_words_of, texts))
    if b"##" in words:
        return words
    letters = words & _LETTERS.keys()
    joined = {each for each in letters if any(map(_LETTERS[each].search, texts))}
    if joined and not _ODD.search(code):
        plain = _TOKENS.sub(_name_of, spliced)
        if b'"' not in plain and b"'" not in plain:
            joined = {each for each in joined if _LETTERS[each].search(plain)}
    return words - _LETTERS.keys() | joined


def _name_of(token: re.Match[bytes]) -> bytes:
    """Return what is left of a token: a name, a digit for a number, nothing of others."""
    if token[0][:1] in b".0123456789":
        return b"0"
    return b" " if token[0][:1] in b"\"'/" else token[0]


def _can_be_joined(macro: bytes, words: set[bytes]) -> bool:
    ends = {0}
    for end in range(1, len(macro) + 1):
        if any(macro[start:end] in words for start in ends):
            ends.add(end)
    return len(macro) in ends


def another_time() -> int:
    """Return a time, in seconds, that is written with other letters and digits than now."""
    now = time.ctime()
    while True:
        other = random.randrange(10**8, 10**9)  # 1973 to 2001
        pairs = zip(now, time.ctime(other), strict=True)
        if all(one != another for one, another in pairs if one.isalnum()):
            return other
