"""Macros: what the texts of a compile define, every branch taken, found when it is asked for.

Few of the thousands of macros that headers define ever name a header. To take all of them apart
costs as much as everything else that is read off the texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy

from kcache.nvrtc.scan import DIRECTIVE, GAP, Macro, plain_text

__all__ = ["Macros"]

#: Without the `#`, so that the search is for a fixed word.
_NAMED = re.compile(rb"define" + GAP + rb"([A-Za-z_]\w*)", re.DOTALL)
#: Groups: the parameters in parentheses, the replacement.
_REST = rb"(?!\w)(\([^)\n]*\))?([^\n]*)"


class Macros:
    """Every macro that texts define, with all of its definitions.

    Args:
        texts: spliced.
    """

    def __init__(self, texts: Iterable[bytes]) -> None:
        self._texts = [text for text in texts if b"define" in text]
        self._instead: Mapping[str, Sequence[Macro]] = {}
        self._names: frozenset[bytes] | None = None
        self._found: dict[str, tuple[Macro, ...]] = {}

    @property
    def names(self) -> frozenset[bytes]:
        """What is defined, and perhaps more: text in a comment may look like a definition."""
        if self._names is None:
            found = (name for text in self._texts for name in _NAMED.findall(text))
            self._names = frozenset(found)
        return self._names

    def get(self, name: str, default: Iterable[Macro] = (), /) -> Iterable[Macro]:
        """Return the definitions of `name`, `default` if there are none."""
        known = self._found.get(name)
        if known is None:
            known = (*self._find(name.encode("utf-8", "surrogateescape")),)
            self._found[name] = known
        return self._instead.get(name) or known or default

    def beside(self, instead: Mapping[str, Sequence[Macro]]) -> Macros:
        """Return the same macros, but for those in `instead`."""
        other = copy(self)
        other._instead = instead
        return other

    def _find(self, name: bytes) -> Iterable[Macro]:
        if name not in self.names:
            return
        definition = re.compile(DIRECTIVE + rb"define" + GAP + re.escape(name) + _REST, re.DOTALL)
        for text in self._texts:
            if name in text:
                for match in definition.finditer(text):
                    parameters = None
                    if match[1] is not None:
                        inner = plain_text(match[1]).strip("()")
                        parameters = tuple(each.strip() for each in inner.split(","))
                    yield Macro(parameters, plain_text(match[2]))
