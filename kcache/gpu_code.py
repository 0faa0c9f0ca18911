"""GpuCode: reads names of kernels, and the architecture, from a source, PTX or a CUBIN."""

from __future__ import annotations

import re

#: The target's directive in PTX, and the assembler's options in a note of a CUBIN. CUBINs of CUDA
#: 13 have that note; those of 12.4 do not.
_TARGET = re.compile(rb"^\s*\.target\s+(sm_\d+[af]?)", re.MULTILINE)
_ASSEMBLED = re.compile(rb"-arch (sm_\d+[af]?)\b")
#: The name of a kernel where its source defines it, whatever qualifiers it has.
_DEFINED = re.compile(r"__global__[\w\s]*?(?:__\w+__\s*\([^()]*\)[\w\s]*?)?\b(\w+)\s*\(")
#: The name of a kernel template where its source defines it.
_TEMPLATE = re.compile(rf"\btemplate\s*<[^;{{}}]*?{_DEFINED.pattern}")
#: A kernel in PTX ("Kernel Entry Points", PTX ISA). Longer patterns take ten times as long.
_ENTRY = re.compile(rb"\.entry\s+([\w$%]+)")
#: The section of a kernel's constants, in a CUBIN's table of section names. Device functions do not
#: have such a section. NVIDIA does not document it; each CUBIN of NVRTC 12.4 to 13.5, for sm_75 to
#: sm_120, has it.
_CONSTANTS = re.compile(rb"\0\.nv\.constant0\.([\w$%]+)(?=\0)")


def kernels_in(source: str) -> list[str]:
    """Return the names of the kernels that a source itself seems to define."""
    return _DEFINED.findall(source)


def templates_in(source: str) -> list[str]:
    """Return the names of the kernels that a source itself seems to define as templates."""
    return _TEMPLATE.findall(source)


def kernels_of(ptx: bytes | None, cubin: bytes | None) -> list[str]:
    """Return the names of the kernels, as the module has them, sorted."""
    if ptx is None:
        found = _CONSTANTS.findall(cubin or b"")
    else:
        found = [each[1] for each in _ENTRY.finditer(ptx) if not _is_comment(ptx, each.start())]
    return sorted({name.decode() for name in found})


def _is_comment(ptx: bytes, at: int) -> bool:
    return b"//" in ptx[ptx.rfind(b"\n", 0, at) + 1 : at]


def arch_of(ptx: bytes | None, cubin: bytes | None = None) -> str | None:
    """Return the architecture of PTX or else of a CUBIN, such as `"sm_90a"`; None if unknown."""
    found = _TARGET.search(ptx or b"") or _ASSEMBLED.search(cubin or b"")
    return None if found is None else found[1].decode()
