"""Proofs: prove that a kernel does not depend on where its headers lie.

A kernel whose headers mention `__FILE__` may depend on where they lie. It is stored for its
location alone, until a second compile with other paths (`nvrtc.relocation`) gives the same bytes.
With the setting `relocation="lazy"`, that happens when a second location asks for the kernel. With
`"eager"`, it happens in the background after the first compile. Then a user who gets a copy of the
cache need not compile at all.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from kcache.errors import KcacheError
from kcache.kernels.compiled_kernel import CompiledKernel
from kcache.nvrtc.workers import PROCESS_ID
from kcache.util import log

if TYPE_CHECKING:
    from kcache.kernels.find import Finder
    from kcache.nvrtc.compiler import Compiled
    from kcache.nvrtc.frontend import Frontend
    from kcache.nvrtc.manifest import StoredHeaderSet
    from kcache.nvrtc.request import Request

__all__ = ["Verdict", "prove"]


class Verdict(NamedTuple):
    """The result of a proof.

    Attributes:
        good: whether the kernel is good wherever its headers lie.
        kernel: the kernel as it is stored.
    """

    good: bool
    kernel: CompiledKernel


def prove(
    finder: Finder, frontend: Frontend, request: Request, header_set: StoredHeaderSet
) -> Verdict | None:
    """Compile a stored kernel once more under other paths; return the verdict, or None.

    There is no verdict if the kernel is gone, the headers have changed, or the worker crashed.

    Args:
        finder: of the cache that the kernel is in.
        frontend: compiles.
        request: a request whose headers are as `header_set` says.
        header_set: the header set that leads to the kernel.
    """
    key = header_set.result_key(request.key)
    entry, _ = finder.engine.fetch(key, again=True)
    if entry is None:
        return None
    try:
        kernel = CompiledKernel.from_entry(entry, key, ())
        proof = frontend.compile_elsewhere(request, header_set)
    except KcacheError as error:
        log.debug(
            "the proof that %s does not depend on its location failed: %s",
            request.source_name,
            error,
        )
        return None
    finder.engine.counters.add("proofs")
    if proof.compiled is None:
        return Verdict(good=False, kernel=kernel) if proof.conclusive else None
    return Verdict(_equal(kernel, proof.compiled), kernel)


def _equal(stored: CompiledKernel, compiled: Compiled) -> bool:
    """Tell whether a stored kernel is what was compiled just now."""
    if (stored.log, dict(stored.lowered_names)) != (compiled.log, dict(compiled.lowered_names)):
        return False
    outputs = zip(
        (stored.ptx, stored.cubin, stored.ltoir),
        (compiled.ptx, compiled.cubin, compiled.ltoir),
        strict=True,
    )
    return all(_normal(one) == _normal(other) for one, other in outputs)


def _normal(output: bytes | None) -> bytes | None:
    """Return an output whose internal symbols tell neither the time nor a directory.

    They end in eight digits made of the time in seconds and of the working directory, and in the
    process id. Nothing outside the kernel's module can refer to such a symbol.
    """
    if output is None:
        return None
    return re.sub(rb"_[0-9a-f]{8}_%d" % PROCESS_ID, b"_00000000_%d" % PROCESS_ID, output)
