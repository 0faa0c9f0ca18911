"""Code: reads architecture, kernels and parameters from PTX and CUBIN.

Pure functions over the bytes that a compiler returned. The sources are the PTX ISA ("Kernel Entry
Points", ".param") and the ELF gABI. There is no public description of NVIDIA's additions to ELF. We
found them in the output of NVRTC 12.9 and 13.5.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, Protocol

from kcache.errors import DeviceError

__all__ = [
    "Arch",
    "Code",
    "Kernel",
    "Kind",
    "Parameter",
    "arch_of",
    "choose",
    "kernels_of",
    "parameters_of",
]

#: The kind of a parameter: a floating-point number, an integer or pointer, a struct, or unknown.
Kind = Literal["float", "integer", "struct", "unknown"]


class Code(Protocol):
    """What can be loaded."""

    @property
    def ptx(self) -> bytes | None:
        """PTX text."""
        ...

    @property
    def cubin(self) -> bytes | None:
        """Machine code."""
        ...

    @property
    def ltoir(self) -> bytes | None:
        """LTOIR."""
        ...


class Kernel(Code, Protocol):
    """The parts of a CompiledKernel that this module uses."""

    @property
    def lowered_names(self) -> Mapping[str, str]:
        """Name expression -> name in the module."""
        ...

    @property
    def key(self) -> str:
        """The key that it is cached under."""
        ...


class Arch(NamedTuple):
    """An architecture: 90 and `a` for sm_90a."""

    number: int
    suffix: str = ""

    def __str__(self) -> str:
        return f"sm_{self.number}{self.suffix}"

    def runs_on(self, device: int) -> bool:
        """Tell whether machine code for it runs on a device of compute capability `device`.

        That is: on the same major version and the same minor version or a later one; with the
        suffix `a`, on this one alone (CUDA C++ Programming Guide, "Binary Compatibility").
        """
        if self.suffix == "a":
            return device == self.number
        return device // 10 == self.number // 10 and device >= self.number

    def compiles_for(self, device: int) -> bool:
        """Tell whether the driver can compile PTX for it for a device.

        PTX runs on every later architecture, unless it is specific to one (`a`) or a family (`f`).
        """
        return self.runs_on(device) if self.suffix else device >= self.number


class Parameter(NamedTuple):
    """A parameter of a kernel: its size in bytes, and its kind."""

    size: int
    kind: Kind


# -- PTX -----------------------------------------------------------------------------------------

_TARGET = re.compile(rb"^\s*\.target\s+sm_(\d+)([af]?)", re.MULTILINE)
#: Matches a kernel and its list of parameters, from the start of a line, so not in a comment.
_ENTRY = re.compile(
    rb"^[ \t]*(?:\.(?:visible|weak|extern)\s+)*\.entry\s+([\w$%]+)\s*(?:\(([^)]*)\))?",
    re.MULTILINE,
)
_TYPE = re.compile(rb"\.([busf])(\d+)\s")
_ARRAY = re.compile(rb"\[(\d+)\]\s*$")


def _ptx_arch(ptx: bytes) -> Arch | None:
    found = _TARGET.search(ptx)
    return None if found is None else Arch(int(found[1]), found[2].decode())


def _parameter(text: bytes) -> Parameter:
    found = _TYPE.search(text)
    if found is None:
        return Parameter(0, "unknown")
    size = int(found[2]) // 8
    array = _ARRAY.search(text)
    if array is not None:
        return Parameter(size * int(array[1]), "struct")
    return Parameter(size, "float" if found[1] == b"f" else "integer")


def parameters_of(ptx: bytes, kernel: str) -> tuple[Parameter, ...] | None:
    """Return the parameters of a kernel, or None if the PTX has none of that name.

    Pointers and both kinds of integers look the same in PTX: all are integers here. `half`,
    `float2` and the like are structs.
    """
    for found in _ENTRY.finditer(ptx):
        if found[1].decode() == kernel:
            listed = (found[2] or b"").strip()
            return tuple(_parameter(text) for text in listed.split(b",")) if listed else ()
    return None


# -- CUBIN ---------------------------------------------------------------------------------------

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMTAB = 2
_FUNCTION = 2
#: The bit of `st_other` that kernels have and device functions lack.
_KERNEL = 0x10


def _cubin_arch(cubin: bytes) -> Arch | None:
    """Return the architecture in an ELF header's flags, which have no reliable suffix.

    The number is the lowest byte up to ABI version 7 (CUDA 12 up to sm_90), and then the second.
    """
    if len(cubin) < 64 or cubin[:4] != b"\x7fELF":
        return None
    (flags,) = struct.unpack_from("<I", cubin, 48)
    return Arch(flags & 0xFF if cubin[8] < 8 else flags >> 8 & 0xFF)


def _cubin_kernels(cubin: bytes) -> list[str]:
    """Return the names of the kernels in the symbol table of an ELF file."""
    if cubin[:4] != b"\x7fELF":
        return []
    try:
        (offset,) = struct.unpack_from("<Q", cubin, 40)
        size, count = struct.unpack_from("<HH", cubin, 58)
        sections = [_SECTION.unpack_from(cubin, offset + n * size) for n in range(count)]
        return [name for section in sections for name in _kernels_in(cubin, section, sections)]
    except (struct.error, IndexError, ValueError):
        return []


def _kernels_in(
    cubin: bytes, section: tuple[int, ...], sections: list[tuple[int, ...]]
) -> Iterator[str]:
    _, kind, _, _, offset, size, link, *_ = section
    if kind != _SYMTAB:
        return
    names = sections[link][4]
    for at in range(offset, offset + size, _SYMBOL.size):
        name, info, other, *_ = _SYMBOL.unpack_from(cubin, at)
        if info & 0xF == _FUNCTION and other & _KERNEL:
            yield cubin[names + name : cubin.index(b"\0", names + name)].decode()


# -- both ----------------------------------------------------------------------------------------


def kernels_of(ptx: bytes | None, cubin: bytes | None) -> list[str]:
    """Return the names of the kernels, as the module has them, sorted."""
    if ptx is not None:
        return sorted(found[1].decode() for found in _ENTRY.finditer(ptx))
    return sorted(_cubin_kernels(cubin)) if cubin is not None else []


def arch_of(ptx: bytes | None, cubin: bytes | None) -> Arch | None:
    """Return the architecture that the code is for, or None if the code does not say."""
    found = _ptx_arch(ptx) if ptx is not None else None
    return _cubin_arch(cubin) if found is None and cubin is not None else found


def choose(code: Code, device: int) -> list[bytes]:
    """Return the code that a device of compute capability `device` can load, best first.

    That is the CUBIN if it is for this architecture, then PTX; nothing for LTOIR alone.

    Raises:
        DeviceError: the code is for another architecture.
    """
    arch = _ptx_arch(code.ptx) if code.ptx is not None else None
    fits: list[bytes] = []
    if code.cubin is not None:
        own = arch or _cubin_arch(code.cubin)
        if own is None or own.runs_on(device):
            fits.append(code.cubin)
        arch = own
    if code.ptx is not None and (arch is None or arch.compiles_for(device)):
        fits.append(code.ptx)
    if not fits and code.ltoir is None:
        if arch is None:
            raise DeviceError("the kernel has neither CUBIN nor PTX nor LTOIR: nothing to load")
        raise DeviceError(f"the kernel is for {arch}, the device is {Arch(device)}")
    return fits
