"""FileScan: what the text of a source or header says about other files, every branch taken.

A textual scan errs on one side only: comments, strings and branches not taken count too. What it
can't read off the text (a macro as the operand of `#include`) it names, for others to resolve.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from kcache.nvrtc.search import Include

__all__ = [
    "FileScan",
    "Macro",
    "expand",
    "macros",
    "probes",
    "scan",
    "spliced",
    "uses_time",
]

_GAP = rb"(?:[ \t\f\v]|/\*.*?\*/)*"
_INCLUDE = re.compile(
    rb"(?:#|%:)" + _GAP + rb"include(?:_next)?\b" + _GAP + rb'(<[^>\n]*>|"[^"\n]*"|[^\n]*)',
    re.DOTALL,
)
_PROBED = _GAP + rb'(<[^>\n]*>|"[^"\n]*"|[^\n)]*)'
_PROBES = re.compile(rb"__has_(?:include|embed)")
_DEFINE = re.compile(
    rb"(?:#|%:)" + _GAP + rb"define" + _GAP + rb"([A-Za-z_]\w*)(\([^)\n]*\))?([^\n]*)", re.DOTALL
)
_DIRECTIVE = re.compile(rb"(?:#|%:)[^\n]*")
_EMBED = re.compile(rb"(?:#|%:)" + _GAP + rb"embed\b", re.DOTALL)
_SPLICE = re.compile(rb"\\\r?\n")
_TIME = re.compile(rb"__(?:DATE|TIME|TIMESTAMP)__")
_FILE = re.compile(rb"__FILE__|__builtin_FILE|source_location")
#: Comments and literals, so that a word inside either is not taken for code.
_SKIPPED = re.compile(
    rb'//[^\n]*|/\*.*?\*/|R"([^()\\\s]{0,16})\(.*?\)\1"|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'',
    re.DOTALL,
)
_LINE_COMMENT = re.compile(rb"//[^\n]*|/\*.*?\*/", re.DOTALL)
_CALL = re.compile(r"([A-Za-z_]\w*)\s*(?:\((.*)\))?\s*")


class Macro(NamedTuple):
    """One definition: parameter names (None for an object-like macro) and the replacement."""

    parameters: tuple[str, ...] | None
    body: str


class FileScan(NamedTuple):
    """What one text says about other files.

    Attributes:
        includes: literal operands of `#include`.
        computed: operands of `#include` that are macros.
        probes: whether it names `__has_include` or `__has_embed`.
        time: whether it uses `__DATE__`, `__TIME__` or `__TIMESTAMP__`.
        file: whether it uses `__FILE__` or its kin, directly rather than in a directive.
        file_macro: whether it uses them at all.
        embed: whether it has an `#embed`.
    """

    includes: frozenset[Include]
    computed: frozenset[str]
    probes: bool
    time: bool
    file: bool
    file_macro: bool
    embed: bool


def uses_time(text: bytes) -> bool:
    """Tell whether code, not comments or literals, names the time of the compile."""
    if not _TIME.search(text):
        return False
    return _TIME.search(_SKIPPED.sub(b" ", _SPLICE.sub(b"", text))) is not None


def scan(text: bytes) -> FileScan:
    """Return what `text` says about other files."""
    text = spliced(text)
    includes: set[Include] = set()
    computed: set[str] = set()
    if b"include" in text:
        for match in _INCLUDE.finditer(text):
            _operand(match[1], includes, computed)
        if computed:  # most often prose in a comment; look again without
            computed.clear()
            for match in _INCLUDE.finditer(_SKIPPED.sub(_without_comment, text)):
                _operand(match[1], set(), computed)
    file_macro = _FILE.search(text) is not None
    return FileScan(
        frozenset(includes),
        frozenset(computed),
        _PROBES.search(text) is not None,
        uses_time(text),
        file_macro and _FILE.search(_SKIPPED.sub(b" ", _DIRECTIVE.sub(b"", text))) is not None,
        file_macro,
        b"embed" in text and _EMBED.search(text) is not None,
    )


def spliced(text: bytes) -> bytes:
    """Return the text with continued lines joined, as the compiler does first of all."""
    return _SPLICE.sub(b"", text) if b"\\\n" in text or b"\\\r\n" in text else text


def macros(texts: Iterable[bytes]) -> dict[str, list[Macro]]:
    """Return every macro that the texts define, with all of its definitions."""
    found: dict[str, list[Macro]] = {}
    for text in texts:
        for match in _DEFINE.finditer(text):
            parameters = None
            if match[2] is not None:
                parameters = tuple(p.strip() for p in _text(match[2]).strip("()").split(","))
            found.setdefault(_text(match[1]), []).append(Macro(parameters, _text(match[3])))
    return found


def probes(texts: Mapping[str, bytes]) -> tuple[set[tuple[str, Include]], bool]:
    """Return every operand of `__has_include` in the texts, and whether that is all of them.

    `texts` maps names of files to their spliced text; an operand is given with its file. Follows
    macros that wrap the operator (`#define HAS(x) __has_include(x)`), and macros that wrap those.
    False says that some operand is computed in another way.
    """
    found: set[tuple[str, Include]] = set()
    complete = True
    defined: dict[str, list[Macro]] | None = None
    pending = ["__has_include", "__has_include_next"]
    seen = set(pending)
    while pending:
        word = pending.pop().encode()
        uses = re.compile(
            rb"(?<!\w)" + word + rb"(?!\w)(?:" + _GAP + rb"\(" + _PROBED + rb")?", re.DOTALL
        )
        for name, text in texts.items():
            if word not in text:
                continue
            for match in uses.finditer(text):
                start = text.rfind(b"\n", 0, match.start()) + 1
                definition = (
                    _DEFINE.match(text[start:].lstrip(), 0)
                    if b"define" in text[start : match.start()]
                    else None
                )
                operands: set[Include] = set()
                computed: set[str] = set()
                _operand(match[1] or b"", operands, computed)
                found |= {(name, operand) for operand in operands}
                if definition is None and match[1] is None:
                    continue  # `#ifdef __has_include`, `defined(__has_include)`
                if definition is not None and definition[1] != word:
                    parameters = _text(definition[2] or b"").strip("()").split(",")
                    alias = match[1] is None and _text(definition[3]).encode() == word
                    if alias or computed & {p.strip() for p in parameters}:
                        computed.clear()
                        wrapper = _text(definition[1])
                        if wrapper not in seen:
                            seen.add(wrapper)
                            pending.append(wrapper)
                elif definition is not None:
                    continue  # the definition of the wrapper itself
                for operand in computed:
                    if defined is None:
                        defined = macros(texts.values())
                    expanded = expand(operand, defined)
                    complete = complete and expanded is not None
                    found |= {(name, each) for each in expanded or ()}
    return found, complete


def _without_comment(match: re.Match[bytes]) -> bytes:
    return b" " if match[0].startswith((b"//", b"/*")) else match[0]


def _text(raw: bytes) -> str:
    return _LINE_COMMENT.sub(b" ", raw).decode("utf-8", "surrogateescape").strip()


def _operand(raw: bytes, literal: set[Include], computed: set[str]) -> None:
    text = raw.decode("utf-8", "surrogateescape")
    if len(text) > 2 and text[0] == "<" and text[-1] == ">":
        literal.add(Include(text[1:-1], quoted=False))
    elif len(text) > 2 and text[0] == '"' and text[-1] == '"':
        literal.add(Include(text[1:-1], quoted=True))
    else:
        rest = _text(raw)
        if rest:
            computed.add(rest)


def expand(
    operand: str, defined: Mapping[str, Iterable[Macro]], *, depth: int = 0
) -> frozenset[Include] | None:
    """Return every header that a computed operand can name, or None where that can't be told.

    Knows object-like macros, and function-like ones whose parameters stand for themselves;
    gives up on `#`, `##` and on anything that is not a single call.
    """
    literal: set[Include] = set()
    computed: set[str] = set()
    _operand(operand.strip().encode("utf-8", "surrogateescape"), literal, computed)
    if literal:
        return frozenset(literal) if _plain(operand, defined) else None
    call = _CALL.fullmatch(operand.strip())
    if call is None or depth > 8:
        return None
    name, arguments = call[1], call[2]
    definitions = tuple(defined.get(name, ()))
    if not definitions:
        return None
    found: set[Include] = set()
    for definition in definitions:
        for body in _substituted(definition, arguments):
            inner = None if body is None else expand(body, defined, depth=depth + 1)
            if inner is None:
                return None
            found |= inner
    return frozenset(found)


def _plain(operand: str, defined: Mapping[str, Iterable[Macro]]) -> bool:
    """Tell whether no word between the brackets is itself a macro (quotes are never expanded)."""
    return operand.lstrip().startswith('"') or not any(
        word in defined for word in re.findall(r"[A-Za-z_]\w*", operand)
    )


def _substituted(macro: Macro, arguments: str | None) -> Iterator[str | None]:
    if "#" in macro.body:
        yield None
    elif macro.parameters is None:
        yield macro.body if arguments is None else None
    elif arguments is None or "..." in macro.parameters:
        yield None
    else:
        values = [value.strip() for value in arguments.split(",")]
        if len(values) != len(macro.parameters):
            yield None
            return
        table = dict(zip(macro.parameters, values, strict=True))
        yield re.sub(r"[A-Za-z_]\w*", lambda word: table.get(word[0], word[0]), macro.body)
