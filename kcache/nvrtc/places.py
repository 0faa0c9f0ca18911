"""Places: decides where else the result of a compile may be used.

A kernel is compiled with the true paths. It may also be used in another checkout, container or
machine, if the recorded answers hold there and if its *conditions* hold there, too:

- `shown ROOT TEXT`: the outputs contain the root with the number ROOT, so this root must have the
  spelling TEXT.
- `location DIGEST`: the outputs contain a root in another spelling, so the whole location must be
  the same.
- `length ROOT TEXT`: a line table contains the root with the number ROOT. The root must be as long
  as TEXT, because a path in a line table can be replaced by another path of the same length.
- `within ROOT OUTER PATH`: the root ROOT lies in the root OUTER, at the relative path PATH, and the
  texts that the compiler has read contain each part of PATH where it may become part of a path.
  Therefore a file in ROOT may have been looked for relative to either root: by `#include <a.h>`
  with `-Iinc`, or by `#include "inc/a.h"`. At a location where the roots are not nested like this,
  the request has two *readings*: in one of them ROOT is where it is, in the other one it is at PATH
  in OUTER. The answers must hold for both readings. OUTER may also be the root of the file system,
  because a text may include a file by its absolute path.
- `nested ROOT OUTER PATH`: the same for nvcc, but its result is used only where the roots are
  nested like this.

There is one limit. A kernel that only *computes* with the letters of a path (its length, a hash, a
single letter) does not contain the path. If such a kernel is used at another location, its values
are still those of the location where it was compiled. With `relocation="off"`, every kernel is used
only at its own location. gcc's `-fmacro-prefix-map` and ccache's `base_dir` have the same limit.
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
#: The condition that a text which the compiler has read contains `__DATE__` or `__TIME__`. LTOIR is
#: not cached then: it is encoded, so the poison of the clock can't be found in it; see
#: `workers.recorder`.
CLOCK = "clock"
#: An array in PTX: `.b8 name[3] = {47, 97, 0}`.
_TABLE = rb"\.[bu](8|16|32|64) \S+ = \{([^}]*)\}"
#: Matches what represents a root, or the name of the source, in a stored log.
_PLACEHOLDER = rb"\x01(\d+)\x02"
#: Matches a character after which no path begins in a log.
_IN_A_PATH = rb"[\w./+~\x80-\xff-]"


def questions(request: Request) -> dict[str, Sequence[str]]:
    """Return the conditions of reuse that apply only if certain words occur in the source text.

    The returned dictionary maps each condition to its words. A worker searches all texts that the
    compiler reads. If all words of a condition occur, the condition applies to the result. A word
    that ends in a slash counts only where it may be part of a path. A result to which a `CLOCK`
    condition applies must not be cached.
    """
    found: dict[str, Sequence[str]] = {}
    if request.makes_ltoir:
        found |= {f"{CLOCK} {word}": (word,) for word in ("__DATE__", "__TIME__")}
    if request.shows_paths:  # the key covers all directories
        return found
    search = request.search
    # The compiler answers an include of exactly this name from memory, without asking the system.
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
    """Return all conditions for using the result of `request` at another location.

    Args:
        request: the request that was compiled.
        found: those conditions from `questions` whose words all occur in the texts that the
            compiler has read.
        outputs: all outputs that may contain a path: PTX, CUBIN, lowered names.
    """
    if request.shows_paths:
        return []
    return [*dict.fromkeys((*found, *_shown_in(request, list(filter(None, outputs)))))]


def readings(condition: str, request: Request) -> list[Request]:
    """Return the other readings of `request` for which the answers must hold due to `condition`.

    The module's docstring explains readings. The list is empty if the condition simply holds.

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
    """Return the path in `condition`, for messages."""
    return condition.split(
        " ", {SHOWN: 2, LENGTH: 2, WITHIN: 3, NESTED: 3}.get(condition.partition(" ")[0], 1)
    )[-1]


def _shown(search: HeaderSearch, root: int) -> str:
    return f"{SHOWN} {root} {search.prefixes[root]}"


def _shown_in(request: Request, outputs: list[bytes]) -> Iterator[str]:
    """Yield a condition for each directory that `outputs` contain, the longest directory first.

    A very short directory may be found by chance. This only means that another location, where the
    kernel could have been used, compiles it again.
    """
    search, elsewhere = request.search, f"{LOCATION} {request.location}"
    texts = {path: elsewhere for path in (*search.roots, search.spelled()) if len(path) > 1}
    for root, prefix in reversed(list(enumerate(search.prefixes))):
        if prefix:
            texts[prefix] = _shown(search, root)
    outputs += [table for each in outputs for table in _tables(each)]
    outputs += [each.replace(b"\0", b"") for each in outputs]  # wide literals contain NULs
    for text in sorted(texts, key=len, reverse=True):
        raw = os.fsencode(text)
        if any(raw in output for output in outputs):
            yield texts[text]
            outputs = [output.replace(raw, b"") for output in outputs]


def _tables(ptx: bytes) -> Iterator[bytes]:
    """Yield the bytes of each array that `ptx` contains as a list of numbers.

    If an initializer contains a pointer, each number in it represents eight letters of a text.
    """
    for bits, numbers in re.findall(_TABLE, ptx):
        size = int(bits) // 8
        each = (int(n) if n.isdigit() else 0 for n in numbers.split(b", "))
        yield b"".join((n % (1 << 8 * size)).to_bytes(size, "little") for n in each)


# -- logs ------------------------------------------------------------------------------------------


def portable_log(search: HeaderSearch, log: bytes) -> bytes:
    """Return `log` with placeholders in place of the source's name and the roots.

    `log_at` replaces the placeholders. A log with the character that marks a placeholder is
    returned unchanged.
    """
    numbers = _spelled(search)
    if not numbers or b"\x01" in log:
        return log
    paths = b"|".join(map(re.escape, sorted(numbers, key=len, reverse=True)))
    pattern = re.compile(rb"(?<!%s)(?:%s)" % (_IN_A_PATH, paths))
    return pattern.sub(lambda match: b"\x01%d\x02" % numbers[match[0]], log)


def log_at(search: HeaderSearch, log: bytes) -> bytes:
    """Return a stored log with the source's name and the roots in place of the placeholders.

    It is the log that the compiler would have written for a request with these roots.
    """
    if b"\x01" not in log:
        return log
    paths = {number: path for path, number in reversed(_spelled(search).items())}
    return re.sub(_PLACEHOLDER, lambda match: paths.get(int(match[1]), match[0]), log)


def _spelled(search: HeaderSearch) -> dict[bytes, int]:
    """Return path -> number for the paths with which a message of the compiler may begin.

    The source's name has the number 0, and the roots in `prefixes` have the numbers from 1. A path
    that occurs twice has the smaller number.
    """
    paths = (search.source_name, *search.prefixes)
    numbered = ((path.encode("utf-8", "surrogateescape"), n) for n, path in enumerate(paths))
    found: dict[bytes, int] = {}
    for path, number in numbered:
        if path:
            found.setdefault(path, number)
    return found
