"""Relocation: decides where a result is good, and makes up the other paths of a proof.

An outcome may depend on where its include directories lie, for example by `__FILE__`. If it has
such a path in it, it is good for that location alone. If it has none, it may still depend on the
location: a text that was read may have used a path in a comparison, or as a length. For these
outcomes there is a *proof*. The request is compiled once more, and the worker tells the compiler
other paths of the include directories and of the working directory. If all bytes are the same, the
outcome is good everywhere.

The proof needs no copy of the files. A path below a directory that the compiler was told is
answered with what is in the real directory.

A second compile at another real location would prove less. Two checkouts often have paths of equal
length, and a relative path from one include directory to another leads to the same place in both.
"""

from __future__ import annotations

import codecs
import os
from typing import TYPE_CHECKING, NamedTuple

from kcache.nvrtc.headers import FREE, IN_ANY_DIRECTORY, SHOWN, UNPROVEN
from kcache.nvrtc.manifest import NAMED, ONLY
from kcache.nvrtc.options import CompileOptions
from kcache.nvrtc.search import SOURCE, SPELLING, HeaderSearch
from kcache.nvrtc.workers.texts import NAMES, PATHS, flags_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kcache.nvrtc.compiler import Compiled
    from kcache.nvrtc.request import Request
    from kcache.nvrtc.workers.messages import Trace

__all__ = ["Moved", "bound_of", "called_of", "moved", "shows_name"]

#: Stands in mangled names of functions and variables with internal linkage, before the source's
#: name.
_INTERNAL = (b"_INTERNAL_", b"_GLOBAL__N_")

#: The name of a directory that makes a told path longer than any path in use. NVRTC takes paths of
#: 4,096 bytes (PATH_MAX), and hardly any path of a checkout or an installation has 300.
_FILLER = "Qz" * 150


class Moved(NamedTuple):
    """A request as it would be where its include directories lie elsewhere.

    Attributes:
        request: with the paths that the compiler is told; its key is that of the original.
        directories: told path -> real path, both ending in a slash.
    """

    request: Request
    directories: dict[str, str]


def moved(request: Request, *, source: bool = True) -> Moved:
    """Return the request with the working directory and every include directory elsewhere.

    And with `source`, the directory of a source whose name is an absolute path.

    Each told path has another length than the real one, and other letters. Include directories that
    lie inside each other still do, because that is part of the key. Those in the working directory
    do not: a text that reaches them both ways then leads to other answers. One that is the working
    directory still is.
    """
    search = request.search
    count = len(search.prefixes)
    directory = f"/{_FILLER}/0{_other_letters(search.directory)}"
    told: dict[int, str] = {}
    # The working directory's own names tell that it is an include directory, and a header set holds
    # where it is one. If it lies in another include directory, it moves with that one.
    if search.base != "/" and not any(
        search.base != real and search.base.startswith(real) for real in search.roots[1:count]
    ):
        same = (root for root in range(1, count) if search.roots[root] == search.base)
        told.update(dict.fromkeys(same, f"{directory}/"))
    for root in sorted(range(1, count), key=lambda root: (len(search.roots[root]), root)):
        real = search.roots[root]
        if root in told:
            continue
        outer = next((each for each in told if real.startswith(search.roots[each])), None)
        if outer is None:
            told[root] = f"/{_FILLER}/{root}{_other_letters(real)}"
        else:
            told[root] = told[outer] + real[len(search.roots[outer]) :]
    name = request.source_name
    if source and os.path.isabs(name):
        name = _source_elsewhere(search, told, directory)
    paths = [told[root].removesuffix("/") for root in range(1, count)]
    texts = request.options.parsed.with_include_paths(paths)
    options = CompileOptions(lto=request.options.lto, extra_options=texts)
    elsewhere = request._replace(
        options=options,
        search=HeaderSearch(name, paths, directory=directory),
        source_name=name,
        location="",
    )
    directories = {told[root]: search.roots[root] for root in told}
    return Moved(elsewhere, {**directories, f"{directory}/": search.base})


def _source_elsewhere(search: HeaderSearch, told: dict[int, str], directory: str) -> str:
    """Return the source's name in another directory, which is added to `told`.

    A directory that is also the working directory or an include directory still is.
    """
    real = search.roots[SOURCE]
    same = (told[root] for root in told if search.roots[root] == real)
    alone = f"{directory}/" if real == search.base else f"/{_FILLER}/s{_other_letters(real)}"
    told[SOURCE] = next(same, alone)
    return told[SOURCE] + os.path.basename(search.source_name)


def bound_of(request: Request, trace: Trace, compiled: Compiled) -> str:
    """Return where an outcome is good; see `HeaderSet.bound`."""
    if request.shows_paths:  # the key has them
        return FREE
    spelled, absolute = _paths(request, trace)
    if _holds(compiled, absolute):
        return ONLY + request.location
    flags = _flags(request, trace)
    marks = request.search.marks()
    if any(mark in text for text in request.texts for mark in marks):
        flags |= PATHS
    bound = request.location if flags & PATHS else request.location[:SPELLING]
    if _holds(compiled, spelled):
        return ONLY + bound
    if flags & NAMES:
        return bound + NAMED
    return bound if flags & PATHS else FREE


def called_of(request: Request, trace: Trace, compiled: Compiled) -> str:
    """Return what the source has to be called for an outcome; see `HeaderSet.called`.

    That is its name if the outcome shows it, or if a text that was read could have computed with
    it. It does not matter where it is part of the key.
    """
    name = request.source_name
    if request.has_name:
        return ""
    if _holds(compiled, [name]):
        return SHOWN + name
    if _flags(request, trace) & NAMES:
        return UNPROVEN + name
    return IN_ANY_DIRECTORY + os.path.basename(name) if _has_internal(compiled) else ""


def shows_name(request: Request, compiled: Compiled) -> bool:
    """Tell whether an output or the log may show what the source is called."""
    return _has_internal(compiled) or _holds(compiled, [request.source_name])


def _has_internal(compiled: Compiled) -> bool:
    """Tell whether there are symbols with internal linkage: they hold the name's last part.

    They do not depend on the source's directory (seen with NVRTC 12.4 and 13.5).
    """
    outputs = (compiled.cubin, compiled.ptx)
    return any(mark in output for output in outputs if output for mark in _INTERNAL)


def _flags(request: Request, trace: Trace) -> int:
    """Return what the texts that the compiler got may ask for; see `texts`."""
    flags = 0
    for answer in trace.files.values():
        flags |= answer.flags
    for text in request.texts:
        flags |= flags_of(text.encode("utf-8", "surrogateescape"))
    return flags


def _other_letters(path: str) -> str:
    """Return a path of the same form with other letters, without `.` and `..`."""
    return codecs.encode(path, "rot13").replace(".", "_").swapcase()


def _paths(request: Request, trace: Trace) -> tuple[list[str], list[str]]:
    """Return the paths that tell where the compile was made, as the compiler may write them.

    First come the include directories as they were spelled, then the paths of the working
    directory.
    """
    search = request.search
    used = {search.rooted(path).root for path in trace.files}
    spelled = {prefix for root, prefix in enumerate(search.prefixes) if prefix and root in used}
    absolute = {root for n, root in enumerate(search.roots) if n in used} | {search.base}
    return sorted(spelled), sorted(absolute - spelled)


def _holds(compiled: Compiled, paths: Sequence[str]) -> bool:
    """Tell whether one of the paths is in an output or in the log.

    PTX writes strings as lists of decimal bytes, `.b8 name[3] = {47, 97, 0}`. A path of one letter
    and a slash may be found by chance. That only costs a compile at another location.
    """
    outputs = [output for output in (compiled.cubin, compiled.ltoir, compiled.ptx) if output]
    outputs.append(compiled.log.encode())
    for path in paths:
        raw = os.fsencode(path)
        decimal = ", ".join(map(str, raw)).encode()
        if any(raw in output or decimal in output for output in outputs):
            return True
    return False
