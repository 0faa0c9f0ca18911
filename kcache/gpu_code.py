"""GpuCode: finds the names of kernels in a source, PTX or CUBIN, and a module's architecture."""

from __future__ import annotations

import re

# A cache hit does not need these patterns, so `re` compiles each when it is first used.

#: The `.target` directive in PTX, and the assembler's options in the note section of a CUBIN.
#: CUBINs of CUDA 13 have that note; those of CUDA 12.4 do not.
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
    """Return the names of the kernels that `source` seems to define, not counting its headers.

    The source is searched with a regular expression, not parsed.
    """
    return re.findall(_DEFINED, source)


def templates_in(source: str) -> list[str]:
    """Return the names of the kernel templates that `source` seems to define; see `kernels_in`."""
    return re.findall(_TEMPLATE, source)


def kernels_of(ptx: bytes | None, cubin: bytes | None) -> list[str]:
    """Return the names of the kernels in a module as they appear in the module, sorted.

    The names are mangled, unless the source declares a kernel as `extern "C"`. They are read from
    the PTX, or from the CUBIN if there is no PTX.
    """
    if ptx is None:
        found = re.findall(_CONSTANTS, cubin or b"")
    else:
        found = [m[1] for m in re.finditer(_ENTRY, ptx) if not _is_comment(ptx, m.start())]
    return sorted({name.decode() for name in found})


def _is_comment(ptx: bytes, at: int) -> bool:
    return b"//" in ptx[ptx.rfind(b"\n", 0, at) + 1 : at]


def arch_of(ptx: bytes | None, cubin: bytes | None = None) -> str | None:
    """Return the architecture of a module, such as `"sm_90a"`, or None if it is unknown.

    The architecture is read from the PTX, or from the CUBIN if the PTX does not name it.
    """
    found = re.search(_TARGET, ptx or b"") or re.search(_ASSEMBLED, cubin or b"")
    return None if found is None else found[1].decode()
