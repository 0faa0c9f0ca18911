"""Relocation: finds out where an outcome is good, and makes up the other place of a proof.

An outcome is good where it was compiled: with these include directories as they are spelled, in
this working directory, and with this name of the source. It is good elsewhere only after a *proof*.
The request is compiled once more, and the compiler is told other include directories, another
working directory and another name of the source, each of another length and in other letters. If
all bytes are the same, the outcome is good everywhere.

The proof needs no copy of the files. A path below a directory that the compiler was told is
answered with what is in the real directory. The told directories do not lie inside each other. So
the paths that the compiler asks for also tell from which directory each one starts.

What an outcome shows of its place would differ. The proof leaves that as it is, and the outcome is
good only where it is the same.
"""

from __future__ import annotations

import codecs
import os
import re
from typing import TYPE_CHECKING

from kcache.nvrtc.options import CompileOptions
from kcache.nvrtc.search import SOURCE, HeaderSearch
from kcache.nvrtc.workers import PROCESS_IDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Protocol

    from kcache.nvrtc.request import Request

    class Outcome(Protocol):
        """What a compile returned; a stored kernel is one, too."""

        @property
        def ptx(self) -> bytes | None: ...
        @property
        def cubin(self) -> bytes | None: ...
        @property
        def ltoir(self) -> bytes | None: ...
        @property
        def lowered_names(self) -> Mapping[str, str]: ...
        @property
        def log(self) -> str: ...


#: Stands in mangled names of functions and variables with internal linkage, before the last part of
#: the source's name. They do not depend on its directory (seen with NVRTC 12.4 and 13.5).
_INTERNAL = (b"_INTERNAL_", b"_GLOBAL__N_")
#: The end of such a name: eight digits made of the time in seconds and of the working directory,
#: and the process id. Nothing outside the kernel's module can refer to such a symbol.
_MADE_UP = re.compile(rb"_[0-9a-f]{8}_(?:%s)" % b"|".join(b"%d" % each for each in PROCESS_IDS))

#: The name of a directory that makes a told path longer than any path in use. NVRTC takes paths of
#: 4,096 bytes (PATH_MAX), and hardly any path of a checkout or an installation has 300.
_FILLER = "Qz" * 150


def moved(request: Request, kept: Iterable[str]) -> tuple[Request, dict[str, str]]:
    """Return the request in another place, but for what an outcome shows; see `shown`.

    It has the paths and the name that the compiler is told; its key is that of the original. The
    mapping has told path -> real path, both ending in a slash.
    """
    search, fixed = request.search, {field.partition("=")[0] for field in kept}
    given = request.options.parsed.include_paths
    directories: dict[str, str] = {}

    def told(what: str, real: str) -> str:
        path = f"/{_FILLER}/{what}{_other_letters(real)}"
        directories[path] = real
        return path

    directory = search.directory
    if "directory" not in fixed:
        directory = told("d", search.base).removesuffix("/")
    paths = [
        path if str(root) in fixed else told(str(root), search.roots[root]).removesuffix("/")
        for root, path in enumerate(given, 1)
    ]
    name = request.source_name
    if "name" not in fixed:
        last = os.path.basename(name)
        folder = search.prefixes[SOURCE] if "0" in fixed else told("s", search.roots[SOURCE])
        name = folder + (last if "last" in fixed else f"{_FILLER[:30]}{_other_letters(last)}")
    elsewhere = request._replace(
        options=CompileOptions(
            lto=request.options.lto, extra_options=request.options.parsed.with_include_paths(paths)
        ),
        search=HeaderSearch(name, paths, directory=directory, headers=request.headers),
        source_name=name,
        location="",
    )
    return elsewhere, directories


def _other_letters(path: str) -> str:
    """Return a path of the same form with other letters, without `.` and `..`."""
    return codecs.encode(path, "rot13").replace(".", "_").swapcase()


def shown(request: Request, asked: Iterable[str], outcome: Outcome) -> tuple[str, ...] | None:
    """Return what an outcome shows of its place, in the form of `HeaderSearch.shows`.

    `asked` are the paths that the compiler has asked for.

    It is None if it is good only there: it shows a directory otherwise than it was spelled, or the
    key has all of them.
    """
    if request.shows_paths:
        return None
    found = tuple(_seen(_places(request, asked), outcome))
    if "" in found:
        return None
    names = [field for field in found if field.startswith(("name=", "last="))]
    if not names and any(mark in text for mark in _INTERNAL for text in _outputs(outcome)):
        return (*found, f"last={os.path.basename(request.source_name)}")
    return found


def shows_name(request: Request, outcome: Outcome) -> bool:
    """Tell whether an outcome shows the name of the source, or its last part."""
    found = shown(request, (), outcome) or ()
    return any(field.startswith(("name=", "last=")) for field in found)


def _places(request: Request, asked: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the texts that tell where a compile was made, and what an outcome shows by each.

    That is nothing for a directory as it was not spelled.
    """
    search = request.search
    yield request.source_name, f"name={request.source_name}"
    yield search.spelled(), f"directory={search.spelled()}"
    yield search.directory, ""
    for root in {search.rooted(path).root for path in asked}:
        if 0 <= root < len(search.prefixes) and search.prefixes[root]:
            yield search.prefixes[root], f"{root}={search.prefixes[root]}"
            yield search.roots[root], ""


def _seen(places: Iterable[tuple[str, str]], outcome: Outcome) -> Iterator[str]:
    """Yield what an outcome shows, the longest texts first.

    PTX writes strings as lists of decimal bytes, `.b8 name[3] = {47, 97, 0}`. A path of one letter
    and a slash may be found by chance. That only costs a compile at another location.
    """
    outputs = _outputs(outcome)
    told: set[str] = set()
    for text, field in sorted(places, key=lambda place: len(place[0]), reverse=True):
        if text in told:
            continue
        told.add(text)
        raw = os.fsencode(text)
        forms = (raw, ", ".join(map(str, raw)).encode())
        if any(form in output for output in outputs for form in forms):
            yield field
            for form in forms:
                outputs = [output.replace(form, b"") for output in outputs]


def _outputs(outcome: Outcome) -> list[bytes]:
    outputs = (outcome.cubin, outcome.ltoir, outcome.ptx, outcome.log.encode())
    return [output for output in outputs if output]


def alike(one: Outcome, other: Outcome) -> bool:
    """Tell whether two outcomes are the same, but for what tells the time in internal names."""
    return _comparable(one) == _comparable(other)


def _comparable(outcome: Outcome) -> tuple[object, ...]:
    texts = (outcome.ptx, outcome.cubin, outcome.ltoir)
    names = "\n".join(f"{name} {lowered}" for name, lowered in outcome.lowered_names.items())
    return outcome.log, *(text and _MADE_UP.sub(b"", text) for text in (*texts, names.encode()))
