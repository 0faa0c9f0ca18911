"""Relocation: the proof that a kernel does not depend on where its headers lie.

Two compiles of one request under different paths got the same answers from the file system. If
their outputs are equal, the paths did not matter, and the kernel is good at every location.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kcache.errors import CorruptEntryError
from kcache.kernels.compiled_kernel import CompiledKernel
from kcache.nvrtc.workers import PROCESS_ID

if TYPE_CHECKING:
    from kcache.entry import Entry
    from kcache.kernels.find import Finder
    from kcache.nvrtc.compiler import Compiled
    from kcache.nvrtc.frontend import Outcome
    from kcache.nvrtc.manifest import Variant
    from kcache.nvrtc.request import Request

__all__ = ["proven_elsewhere"]


def proven_elsewhere(finder: Finder, request: Request, outcome: Outcome) -> Variant | None:
    """Return the header set of a compile, good for every location, if that is proven now.

    It is where the same answers led to the same bytes under other paths before.
    """
    variant = outcome.variant
    if variant is None or not variant.may_be_good_elsewhere:
        return None
    manifest, _ = finder.headers.manifest(request, again=True)
    other = None if manifest is None else manifest.bound_elsewhere(variant)
    if other is None:
        return None
    entry, _ = finder.engine.fetch(other.result_key(request.key), again=True)
    if entry is None or not _equal(entry, outcome.compiled):
        return None
    return variant.unbound()


def _equal(entry: Entry, compiled: Compiled) -> bool:
    """Tell whether a stored kernel is what was compiled just now."""
    try:
        stored = CompiledKernel.from_entry(entry, "", ())
    except CorruptEntryError:
        return False
    if (stored.log, dict(stored.lowered_names)) != (compiled.log, dict(compiled.lowered_names)):
        return False
    outputs = zip(
        (stored.ptx, stored.cubin, stored.ltoir),
        (compiled.ptx, compiled.cubin, compiled.ltoir),
        strict=True,
    )
    return all(_normal(one) == _normal(other) for one, other in outputs)


def _normal(output: bytes | None) -> bytes | None:
    """Return an output with names of internal symbols that do not tell the working directory.

    They end in eight digits made of that and of the source's name, and the process id. Nothing
    outside the kernel's module can refer to such a symbol.
    """
    if output is None:
        return None
    return re.sub(rb"_[0-9a-f]{8}_%d" % PROCESS_ID, b"_00000000_%d" % PROCESS_ID, output)
