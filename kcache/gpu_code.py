"""GpuCode: reads names of kernels, and the architecture, from a source, PTX or a CUBIN."""

from __future__ import annotations

import re

# Patterns that a hit does not need are compiled at their first use, by `re`.

#: The target's directive in PTX, and the assembler's options in a note of a CUBIN. CUBINs of CUDA
#: 13 have that note; those of 12.4 do not.
_TARGET = rb"(?m)^\s*\.target\s+(sm_\d+[af]?)"
_ASSEMBLED = rb"-arch (sm_\d+[af]?)\b"
#: The name of a kernel where its source defines it, whatever qualifiers it has.
_DEFINED = r"__global__[\w\s]*?(?:__\w+__\s*\([^()]*\)[\w\s]*?)?\b(\w+)\s*\("
#: The name of a kernel template where its source defines it.
_TEMPLATE = rf"\btemplate\s*<[^;{{}}]*?{_DEFINED}"
#: A kernel in PTX ("Kernel Entry Points", PTX ISA). Longer patterns take ten times as long.
_ENTRY = rb"\.entry\s+([\w$%]+)"
#: The section of a kernel's constants, in a CUBIN's table of section names. Device functions do not
#: have such a section. NVIDIA does not document it; each CUBIN of NVRTC 12.4 to 13.5, for sm_75 to
#: sm_120, has it.
_CONSTANTS = rb"\0\.nv\.constant0\.([\w$%]+)(?=\0)"


def kernels_in(source: str) -> list[str]:
    """Return the names of the kernels that a source itself seems to define."""
    return re.findall(_DEFINED, source)


def templates_in(source: str) -> list[str]:
    """Return the names of the kernels that a source itself seems to define as templates."""
    return re.findall(_TEMPLATE, source)


def kernels_of(ptx: bytes | None, cubin: bytes | None) -> list[str]:
    """Return the names of the kernels, as the module has them, sorted."""
    if ptx is None:
        found = re.findall(_CONSTANTS, cubin or b"")
    else:
        found = [m[1] for m in re.finditer(_ENTRY, ptx) if not _is_comment(ptx, m.start())]
    return sorted({name.decode() for name in found})


def _is_comment(ptx: bytes, at: int) -> bool:
    return b"//" in ptx[ptx.rfind(b"\n", 0, at) + 1 : at]


def arch_of(ptx: bytes | None, cubin: bytes | None = None) -> str | None:
    """Return the architecture of PTX or else of a CUBIN, such as `"sm_90a"`; None if unknown."""
    found = re.search(_TARGET, ptx or b"") or re.search(_ASSEMBLED, cubin or b"")
    return None if found is None else found[1].decode()
