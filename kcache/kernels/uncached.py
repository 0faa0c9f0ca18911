"""Uncached: one compile without a cache."""

from __future__ import annotations

from kcache.kernels.request_factory import with_target
from kcache.nvrtc import compiler
from kcache.nvrtc.options import CompileOptions
from kcache.nvrtc.request import DEFAULT_NAME, Request

__all__ = ["compile_to_ptx"]


def compile_to_ptx(
    source: str, options: CompileOptions | None = None
) -> tuple[bytes | None, bytes | None]:
    """Compile without a cache; return (PTX, CUBIN or None).

    PTX is None only for LTOIR.

    Raises:
        ConfigError: an argument is not allowed, or no architecture is given and there is no GPU.
        CompileError: the compiler refused the source.
        CompilerNotFoundError: NVRTC is not installed.
    """
    request = Request.make(
        source, (), with_target(options), None, b"", source_name=DEFAULT_NAME, compiler=""
    )
    compiled = compiler.compile_request(request).compiled
    return compiled.ptx, compiled.cubin
