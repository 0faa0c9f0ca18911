"""Proofs: prove that a kernel is good in other places than that of its compile.

A kernel is stored for the place of its compile: its directories, and the name of its source. It is
good elsewhere once a second compile in another place (`nvrtc.relocation`) has given the same bytes.
With the setting `relocation="lazy"`, that happens when somebody asks from a second place. With
`"eager"`, it happens in the background after the first compile. Then a user who gets a copy of the
cache need not compile at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kcache.errors import KcacheError
from kcache.kernels.compiled_kernel import CompiledKernel
from kcache.nvrtc.relocation import alike
from kcache.util import log

if TYPE_CHECKING:
    from kcache.entry import Entry
    from kcache.kernels.find import Finder
    from kcache.nvrtc.frontend import Frontend
    from kcache.nvrtc.manifest import StoredHeaderSet
    from kcache.nvrtc.request import Request

__all__ = ["Verdict", "prove"]


class Verdict(NamedTuple):
    """The result of a proof.

    Attributes:
        good: whether the kernel is good in other places.
        kernel: the kernel as it is stored.
        entry: its entry.
        header_set: the answers that the proof got; None without headers, or if it is not good.
    """

    good: bool
    kernel: CompiledKernel
    entry: Entry
    header_set: StoredHeaderSet | None


def prove(
    finder: Finder, frontend: Frontend, request: Request, header_set: StoredHeaderSet | None
) -> Verdict | None:
    """Compile a stored kernel once more in another place; return the verdict, or None.

    There is no verdict if the kernel is gone or was proven, the headers have changed, or the worker
    crashed.

    Args:
        finder: of the cache that the kernel is in.
        frontend: compiles.
        request: a request whose headers are as `header_set` says.
        header_set: the header set that leads to the kernel; None for a self-contained source.
    """
    key = request.key if header_set is None else header_set.result_key(request.key)
    entry, _ = finder.engine.fetch(key, again=True)
    if entry is None or (header_set is None and "proof" in entry.metadata):
        return None
    try:
        kernel = CompiledKernel.from_entry(entry, key, ())
        proof = frontend.prove(request, header_set)
    except KcacheError as error:
        log.debug("no proof that %s is good elsewhere: %s", request.source_name, error)
        return None
    finder.engine.counters.add("proofs")
    if proof is None:
        return None
    good = proof.compiled is not None and alike(kernel, proof.compiled)
    return Verdict(good, kernel, entry, proof.header_set if good else None)
