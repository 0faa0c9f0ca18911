"""FileScan: what the text of a source or header says about other files, every branch taken.

A textual scan errs on one side only: comments, strings and branches not taken count too. What it
can't read off the text (a macro as the operand of `#include`) it names, for others to resolve.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from kcache.nvrtc.search import Include

__all__ = [
    "DEFINE",
    "DIRECTIVE",
    "GAP",
    "Definitions",
    "FileScan",
    "Macro",
    "expand",
    "leads_out",
    "names_file",
    "operand_of",
    "packs",
    "plain_text",
    "scan",
    "spliced",
    "uses_time",
]

#: Blanks and comments. Possessive: a run of comments can be divided in more ways than can be tried.
GAP = rb"(?:[ \t\f\v]|(?>/\*.*?\*/))*+"
#: Without the `#`, so that the search is for a fixed word: three times as fast.
_INCLUDE = re.compile(
    rb"include(_next)?\b" + GAP + rb'(<[^>\n]*>|"[^"\n]*"|[^\n]*)',
    re.DOTALL,
)
#: A directive's name is looked for behind at most this much white space.
_INDENT = 80
#: What a directive begins with.
DIRECTIVE = rb"(?:#|%:)" + GAP
#: Groups: the name, the parameters in parentheses, the replacement.
DEFINE = re.compile(
    DIRECTIVE + rb"define" + GAP + rb"([A-Za-z_]\w*)(\([^)\n]*\))?([^\n]*)", re.DOTALL
)
_DIRECTIVE = re.compile(rb"(?:#|%:)[^\n]*")
_EMBED = re.compile(DIRECTIVE + rb"embed\b", re.DOTALL)
_SPLICE = re.compile(rb"\\\r?\n")
#: A part of `__has_include` that is joined to the rest.
_PASTED = re.compile(rb"(?<!\w)__has_(?:i|in|inc|incl|inclu|includ)?[ \t]*(?:##|[,)])")
#: As a directive, as `_Pragma`, and as the argument of a macro that makes one.
_PACK = re.compile(rb"pragma[^\n]*\bpack\b|\bpack\s*\(\s*(?:push|pop|\d+\s*\)|\))", re.IGNORECASE)
_TIME = re.compile(rb"__(?:DATE|TIME|TIMESTAMP)__")
#: A failed assertion, or a message of the compiler: from here on a macro only prints.
_ASSERTION = re.compile(rb"\b(?:__assert_?fail|_wassert|message)\s*\(.*", re.DOTALL)
_FILE_WORDS = (b"__FILE__", b"__builtin_FILE", b"source_location")
#: Comments and literals, so that a word inside either is not taken for code. A quote that nothing
#: closes (`#error don't`, text in a branch not taken) has the rest of its line be neither.
_SKIPPED = re.compile(
    rb"//[^\n]*|/\*.*?\*/"
    rb"|(?<!\w)\.?\d(?:'?[\w.])*"  # numbers first: 1'000 holds no character literal
    rb'|(?<!\w)(?:u8|[uUL])?R"([^()\\\s]{0,16})\(.*?\)\1"'
    rb'|"(?:[^"\\\n]|\\.)*"'
    rb"|'(?:[^'\\\n]|\\.)*'"
    rb"|(?P<open>[\"'][^\n]*)",
    re.DOTALL,
)
_LINE_COMMENT = re.compile(rb"//[^\n]*|/\*.*?\*/", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
#: Macros that no text defines, or not the way the compiler does: `__CUDA_ARCH__` and its like.
_BUILT_IN = re.compile(r"__(?:\w+__|cplusplus|(?:cpp_|CUDA_ARCH|CUDACC|NV|EDG)\w*)")
#: A path that starts at the root, or goes up.
_OUTWARD = re.compile(r"\.\.|(?:^|[<\"(,])\s*/(?![/*])")
#: What may be replaced in a macro's body; strings are left alone.
_REPLACED = re.compile(r'"[^"]*"|\s*##\s*|#\s*([A-Za-z_]\w*)|([A-Za-z_]\w*)')
#: An argument that holds any of this is another text once it is quoted or joined.
_UNTOLD = re.compile(r"[\s\"'\\()#]")
_CALL = re.compile(r"([A-Za-z_]\w*)\s*(?:\((.*)\))?\s*")


#: Bounds of what is made of one computed operand.
_MAX_DEPTH = 8
_MAX_NAMES = 64


class Macro(NamedTuple):
    """One definition: parameter names (None for an object-like macro) and the replacement."""

    parameters: tuple[str, ...] | None
    body: str


class Definitions(Protocol):
    """The macros that texts define: a dictionary, or `kcache.nvrtc.macros.Macros`."""

    def get(self, name: str, default: Iterable[Macro], /) -> Iterable[Macro]:
        """Return every definition of a macro, or `default`."""
        ...


class FileScan(NamedTuple):
    """What one text says about other files.

    Attributes:
        includes: literal operands of `#include`.
        computed: operands of `#include` that are macros.
        probes: whether it names `__has_include` or `__has_embed`, or makes such a name.
        joins: whether it may join the name `__has_include` from pieces.
        time: whether it uses `__DATE__`, `__TIME__` or `__TIMESTAMP__`.
        file: whether it uses `__FILE__` or its kin at all, be it in a macro.
        embed: whether it has an `#embed`.
        alias: whether it gives headers other names (`#pragma include_alias`).
    """

    includes: frozenset[Include]
    computed: frozenset[str]
    probes: bool
    joins: bool
    time: bool
    file: bool
    embed: bool
    alias: bool


def uses_time(text: bytes) -> bool:
    """Tell whether code, not comments or literals, names the time of the compile."""
    return _names_time(spliced(text))


def _names_time(text: bytes) -> bool:
    if b"__DATE__" not in text and b"__TIME" not in text:
        return False
    return _TIME.search(_SKIPPED.sub(_blank, text)) is not None


def packs(text: bytes) -> bool:
    """Tell whether `text` may set how structures are packed, by `#pragma pack`."""
    return b"pack" in text and _PACK.search(spliced(text)) is not None


def scan(text: bytes) -> FileScan:
    """Return what `text`, spliced, says about other files."""
    includes: set[Include] = set()
    computed: set[str] = set()
    if b"include" in text:
        for match in _include_directives(text):
            operand_of(match[2], includes, computed, onward=match[1] is not None)
        if computed:  # most often prose in a comment; look again without
            computed.clear()
            for match in _include_directives(_SKIPPED.sub(_without_comment, text)):
                operand_of(match[2], set(), computed, onward=match[1] is not None)
    asks = b"__has_" in text
    joins = asks and _PASTED.search(text) is not None
    return FileScan(
        frozenset(includes),
        frozenset(computed),
        asks and (joins or b"__has_include" in text or b"__has_embed" in text),
        joins,
        _names_time(text),
        (b"FILE" in text or b"source_location" in text)
        and any(word in text for word in _FILE_WORDS),
        b"embed" in text and _EMBED.search(text) is not None,
        b"include_alias" in text,
    )


def _include_directives(text: bytes) -> Iterator[re.Match[bytes]]:
    """Yield the matches of `_INCLUDE` that a `#` comes before, or a comment that it may hide in."""
    for match in _INCLUDE.finditer(text):
        start = match.start()
        before = text[max(0, start - _INDENT) : start].rstrip(b" \t\f\v")
        if before.endswith((b"#", b"%:", b"*/")) or (not before and start > _INDENT):
            yield match


def names_file(texts: Sequence[bytes], definitions: Iterable[bytes]) -> bool:
    """Tell whether code in the texts names its own file, by `__FILE__`, its kin or a macro of them.

    `definitions` are further texts whose macros count. A macro that hands `__FILE__` to a failed
    assertion and does nothing else with it is left out: what the assertion prints is in the output
    as text, where it can be found.
    """
    definitions = (*texts, *definitions)
    tainted: set[bytes] = set()
    new = set(_FILE_WORDS)
    while new:
        tainted |= new
        words = _any_word(new)
        new = {
            definition[1]
            for text in _holding(new, definitions)
            for definition in DEFINE.finditer(text)
            if words.search(_ASSERTION.sub(b"", definition[3]))
        } - tainted
    words = _any_word(tainted)
    return any(
        words.search(_SKIPPED.sub(_blank, _DIRECTIVE.sub(b"", text)))
        for text in _holding(tainted, texts)
    )


def _any_word(words: Iterable[bytes]) -> re.Pattern[bytes]:
    return re.compile(rb"\b(?:" + b"|".join(sorted(words)) + rb")\b")


def _holding(words: Iterable[bytes], texts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield those texts, spliced, that hold one of the words; a hundred times as fast as `re`."""
    return (spliced(text) for text in texts if any(word in text for word in words))


def spliced(text: bytes) -> bytes:
    """Return the text with continued lines joined, as the compiler does first of all."""
    if b"\\\r\n" in text:
        return _SPLICE.sub(b"", text)
    return text.replace(b"\\\n", b"")  # ten times as fast


def _blank(match: re.Match[bytes]) -> bytes:
    return match[0] if match["open"] else b" "


def _without_comment(match: re.Match[bytes]) -> bytes:
    return b" " if match[0].startswith((b"//", b"/*")) else match[0]


def plain_text(raw: bytes) -> str:
    """Return a piece of a line as text, without comments."""
    return _LINE_COMMENT.sub(b" ", raw).decode("utf-8", "surrogateescape").strip()


def operand_of(
    raw: bytes, literal: set[Include], computed: set[str], *, onward: bool = False
) -> None:
    """Add an operand to the literal or the computed ones; `onward` says of `#include_next`."""
    text = raw.decode("utf-8", "surrogateescape")
    if len(text) > 2 and text[0] == "<" and text[-1] == ">":
        literal.add(Include(text[1:-1], quoted=False, next=onward))
    elif len(text) > 2 and text[0] == '"' and text[-1] == '"':
        literal.add(Include(text[1:-1], quoted=True, next=onward))
    else:
        rest = plain_text(raw)
        if rest:  # no `expand` takes a computed `#include_next` for resolved
            computed.add(f"{rest} of #include_next" if onward else rest)


def expand(operand: str, defined: Definitions, *, depth: int = 0) -> frozenset[Include] | None:
    """Return every header that a computed operand can name, or None where that can't be told.

    Knows object-like macros, between angle brackets too, and function-like ones, with `#` and `##`;
    gives up on variable arguments and on anything that is not a single call.
    """
    literal: set[Include] = set()
    computed: set[str] = set()
    operand_of(operand.strip().encode("utf-8", "surrogateescape"), literal, computed)
    if literal:
        (include,) = literal
        if include.quoted:  # never expanded
            return frozenset(literal)
        names = _names(include.name, defined, depth)
        return None if names is None else frozenset(include._replace(name=n) for n in names)
    call = _CALL.fullmatch(operand.strip())
    if call is None or depth > _MAX_DEPTH:
        return None
    name, arguments = call[1], call[2]
    definitions = tuple(defined.get(name, ()))
    if not definitions:
        return None
    found: set[Include] = set()
    for definition in definitions:
        for body in _substituted(definition, arguments, defined):
            inner = None if body is None else expand(body, defined, depth=depth + 1)
            if inner is None:
                return None
            found |= inner
    return frozenset(found)


def leads_out(operand: str, defined: Definitions) -> bool:
    """Tell whether a computed operand may name a file by `..` or by an absolute path.

    `defined` are all macros that it can use, directly or through others.
    """
    pending, seen = [operand], {operand}
    while pending:
        text = pending.pop()
        if _OUTWARD.search(text):
            return True
        bodies = {macro.body for word in _NAME.findall(text) for macro in defined.get(word, ())}
        pending += bodies - seen
        seen |= bodies
    return False


def _names(name: str, defined: Definitions, depth: int) -> set[str] | None:
    """Return every name that one between angle brackets becomes, or None if that can't be told."""
    found = {""}
    for part in re.split(r"([A-Za-z_]\w*)", name):
        values = {part}
        if _BUILT_IN.fullmatch(part):
            return None
        for macro in defined.get(part, ()):
            inner = None
            if macro.parameters is None and "#" not in macro.body and depth < _MAX_DEPTH:
                inner = _names(macro.body, defined, depth + 1)
            if inner is None or any(" " in each for each in inner):
                return None
            values |= inner  # and itself, where it is not defined
        found = {before + value for before in found for value in values}
        if len(found) > _MAX_NAMES:
            return None
    return found


def _substituted(macro: Macro, arguments: str | None, defined: Definitions) -> Iterator[str | None]:
    """Yield what the use of a macro may become, None where that can't be told.

    An argument becomes what was written or what that expands to: `#` and `##` decide which, here
    or further on.
    """
    if macro.parameters is None:
        yield macro.body if arguments is None and "#" not in macro.body else None
        return
    values = [value.strip() for value in (arguments or "").split(",")]
    variadic = macro.parameters[-1].endswith("...")
    if arguments is None or variadic or len(values) != len(macro.parameters):
        yield None
        return
    choices: list[set[str]] = []
    for value in values:
        names = _names(value, defined, 0)
        if "#" in macro.body and (names is None or any(map(_UNTOLD.search, names))):
            yield None
            return
        choices.append({value, *(names or ())})
    if math.prod(map(len, choices)) > _MAX_NAMES:
        yield None
        return
    for chosen in itertools.product(*choices):
        yield _put_in(macro.body, dict(zip(macro.parameters, chosen, strict=True)))


def _put_in(body: str, table: Mapping[str, str]) -> str | None:
    """Return a macro's replacement with its arguments put in; None if it holds a stray `#`."""

    def put(match: re.Match[str]) -> str:
        quoted, name = match[1], match[2]
        if quoted in table:
            return f'"{table[quoted]}"'
        if name is not None:
            return table.get(name, name)
        return "" if match[0].strip() == "##" else match[0]

    text = _REPLACED.sub(put, body)
    return None if "#" in text else text
