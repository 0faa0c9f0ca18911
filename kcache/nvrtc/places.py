"""Places: decides where else the result of a compile may be used.

A kernel is compiled with the true paths. It is used in another checkout, container or machine if
the recorded answers hold there, and so do its *conditions*:

- `shown ROOT TEXT`: the outputs show the root with this number, so it must have this spelling.
- `location DIGEST`: the outputs show a root in another spelling, so the whole location must be the
  same.
- `length ROOT TEXT`: a line table shows the root; another path of the same length can replace it.
- `within ROOT OUTER PATH`: one root lies in another at this path, and the texts that the compiler
  has read spell each part of the path where it may become a path. So a file in both may have been
  asked for from either root: `#include <a.h>` with `-Iinc`, or `#include "inc/a.h"`. Where the
  roots are not nested like this, the answers must hold for both readings. The outermost root is the
  file system, because a text may include a file by its absolute path.
- `nested ROOT OUTER PATH`: the same for nvcc, whose result is used only where the roots are nested
  like this.

A kernel that only *computes* with the letters of a path (its length, a hash, a single letter) does
not show the path. Elsewhere, such a kernel has the letters of the first compile;
`relocation="off"` binds every kernel to its location. gcc's `-fmacro-prefix-map` and ccache's
`base_dir` have the same limit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from kcache.nvrtc.request import digest_fields
from kcache.nvrtc.search import ABSOLUTE, SOURCE

if TYPE_CHECKING:
    from kcache.nvrtc.request import Request
    from kcache.nvrtc.search import HeaderSearch

SHOWN, LOCATION, LENGTH, WITHIN, NESTED = "shown", "location", "length", "within", "nested"
#: LTOIR is encoded, so a literal that was stringized twice can't be found in it. Therefore LTOIR is
#: not cached if a text that the compiler has read spells `__DATE__` or `__TIME__`.
CLOCK = "clock"
#: An array in PTX: `.b8 name[3] = {47, 97, 0}`.
_TABLE = rb"\.[bu](8|16|32|64) \S+ = \{([^}]*)\}"
#: What represents a root, or the name of the source, in a stored log.
_PLACEHOLDER = rb"\x01(\d+)\x02"
#: A path in a log does not follow one of these characters.
_IN_A_PATH = rb"[\w./+~\x80-\xff-]"


def questions(request: Request) -> dict[str, Sequence[str]]:
    """Return condition -> words that a worker has to search in the texts that the compiler reads.

    The result has the condition if all of its words occur. A word that ends in a slash must occur
    where it may become a part of a path. A result with a `CLOCK` condition can't be cached.
    """
    found: dict[str, Sequence[str]] = {}
    if request.makes_ltoir:
        found |= {f"{CLOCK} {word}": (word,) for word in ("__DATE__", "__TIME__")}
    if request.shows_paths:  # the key has all directories
        return found
    search = request.search
    # An include of exactly this name is answered from memory, without a question.
    found[_shown(search, SOURCE)] = (request.source_name,)
    roots = {ABSOLUTE: "/", **dict(enumerate(search.roots))}
    for root, path in enumerate(search.roots):
        for outer, above in roots.items():
            if path.startswith(above) and (len(path), root) > (len(above), outer):
                below = path[len(above) :]
                parts = sorted(filter(None, below.split("/")), key=len, reverse=True)
                found[f"{WITHIN} {root} {outer} {below}"] = [f"{part}/" for part in parts]
    return found


def conditions(
    request: Request, found: Iterable[str], outputs: Iterable[bytes | None]
) -> list[str]:
    """Return the conditions for the use of a result elsewhere.

    Args:
        request: the request.
        found: the conditions whose words occur in the texts that the compiler has read.
        outputs: everything that may show a path: PTX, CUBIN, lowered names.
    """
    if request.shows_paths:
        return []
    return [*dict.fromkeys((*found, *_shown_in(request, list(filter(None, outputs)))))]


def readings(condition: str, request: Request) -> list[Request]:
    """Return the readings of a request for which a condition requires the answers to hold.

    The list is empty if the condition holds as it is.

    Raises:
        ValueError: the condition does not hold, or is malformed.
    """
    kind, _, rest = condition.partition(" ")
    search = request.search
    with suppress(IndexError):
        if kind in (WITHIN, NESTED):
            root, outer, below = rest.split(" ", 2)
            path = ("/" if int(outer) == ABSOLUTE else search.roots[int(outer)]) + below
            if search.roots[int(root)] == path:
                return []
            if kind == NESTED:
                raise ValueError(condition)
            elsewhere = digest_fields("reading", [(request.location, b""), (condition, b"")])
            return [request._replace(search=search.moved(int(root), path), location=elsewhere)]
        if kind == SHOWN:
            root, text = rest.split(" ", 1)
            if search.prefixes[int(root)] == text:
                return []
        if kind == LENGTH:
            root, text = rest.split(" ", 1)
            if len(os.fsencode(search.prefixes[int(root)])) == len(os.fsencode(text)):
                return []
        if kind == LOCATION and request.location == rest:
            return []
    raise ValueError(condition)


def text_of(condition: str) -> str:
    """Return the path in a condition, for messages."""
    return condition.split(
        " ", {SHOWN: 2, LENGTH: 2, WITHIN: 3, NESTED: 3}.get(condition.partition(" ")[0], 1)
    )[-1]


def _shown(search: HeaderSearch, root: int) -> str:
    return f"{SHOWN} {root} {search.prefixes[root]}"


def _shown_in(request: Request, outputs: list[bytes]) -> Iterator[str]:
    """Yield the conditions for the directories that outputs show, the longest first.

    A very short directory may be found by chance, which only costs a compile at another location.
    """
    search, elsewhere = request.search, f"{LOCATION} {request.location}"
    texts = {path: elsewhere for path in (*search.roots, search.spelled()) if len(path) > 1}
    for root, prefix in reversed(list(enumerate(search.prefixes))):
        if prefix:
            texts[prefix] = _shown(search, root)
    outputs += [table for each in outputs for table in _tables(each)]
    outputs += [each.replace(b"\0", b"") for each in outputs]  # wide literals
    for text in sorted(texts, key=len, reverse=True):
        raw = os.fsencode(text)
        if any(raw in output for output in outputs):
            yield texts[text]
            outputs = [output.replace(raw, b"") for output in outputs]


def _tables(ptx: bytes) -> Iterator[bytes]:
    """Yield the content of each array that PTX writes as a list of numbers.

    In an initializer with a pointer, eight letters of a text are one number.
    """
    for bits, numbers in re.findall(_TABLE, ptx):
        size = int(bits) // 8
        each = (int(n) if n.isdigit() else 0 for n in numbers.split(b", "))
        yield b"".join((n % (1 << 8 * size)).to_bytes(size, "little") for n in each)


# -- logs ------------------------------------------------------------------------------------------


def portable_log(search: HeaderSearch, log: bytes) -> bytes:
    """Return a log with placeholders for the source's name and the roots; see `log_at`."""
    numbers = _spelled(search)
    if not numbers or b"\x01" in log:
        return log
    paths = b"|".join(map(re.escape, sorted(numbers, key=len, reverse=True)))
    pattern = re.compile(rb"(?<!%s)(?:%s)" % (_IN_A_PATH, paths))
    return pattern.sub(lambda match: b"\x01%d\x02" % numbers[match[0]], log)


def log_at(search: HeaderSearch, log: bytes) -> bytes:
    """Return a stored log as the compiler would have written it for a request with these roots."""
    if b"\x01" not in log:
        return log
    paths = {number: path for path, number in reversed(_spelled(search).items())}
    return re.sub(_PLACEHOLDER, lambda match: paths.get(int(match[1]), match[0]), log)


def _spelled(search: HeaderSearch) -> dict[bytes, int]:
    """Return a number for each path that messages begin with; equal paths have the first number."""
    paths = (search.source_name, *search.prefixes)
    numbered = ((path.encode("utf-8", "surrogateescape"), n) for n, path in enumerate(paths))
    found: dict[bytes, int] = {}
    for path, number in numbered:
        if path:
            found.setdefault(path, number)
    return found
