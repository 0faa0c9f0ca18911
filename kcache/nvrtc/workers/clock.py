"""Clock: tells whether texts may use the time of a compile, and makes up another time.

Every compile asks for the time, whatever it does with it. So where a text may use one of the
macros, a second compile at another time decides whether the outcome depends on it. What texts say
only decides whether there is a second compile. Single letters are the names of template parameters
everywhere; so D, I and M, of which each macro has one, count in a text only where they stand as an
argument or as a macro, or where the text joins names itself.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterable

__all__ = ["ClockTest", "another_time"]

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
_LETTER = rb"(?:[(,]|\bdefine\b[ \t]+\w+)\s*(%b)\s*(?:[),]|$)"
#: Matches a line that is continued within a word.
_SPLICE = re.compile(rb"\\(?:(?<=\w\\)|(?<=\?\?/))[ \t]*\r?\n")
_LINE_ENDS = re.compile(rb"(?:\\|\?\?/)[ \t]*\r?\n")
_MOST_TEXTS = 65_536


class ClockTest:
    """Whether texts, taken together, may name one of the macros. Remembers texts by digest."""

    def __init__(self) -> None:
        self._pieces: dict[bytes, frozenset[bytes]] = {}

    def may_ask(self, files: Iterable[tuple[bytes, bytes]], texts: Iterable[bytes]) -> bool:
        """Tell it of files, which are digests and contents, and of other texts."""
        words = set().union(*map(_pieces_of, texts))
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


def _pieces_of(text: bytes) -> frozenset[bytes]:
    """Return the words of a text that may be pieces, and `##` if it joins words."""
    if _SPLICE.search(text):
        text = _LINE_ENDS.sub(b"", text)
    words = _PIECES.intersection(text.translate(_NOT_A_WORD).split())
    if any(join in text for join in _JOINS):
        return words | {b"##"}
    alone = (word for word in words if word in (b"D", b"I", b"M"))
    return words.difference(
        [each for each in alone if not re.search(_LETTER % each, text, re.MULTILINE)]
    )


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
