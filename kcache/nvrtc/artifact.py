"""Artifact: what one compile produced."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple


class Form(IntEnum):
    """How paths stand in the content of a file."""

    #: As they were.
    BINARY = 0
    #: As in `File.path`: a list of dependencies, or source text.
    TEXT = 1
    #: As marks of the same length: a line table.
    LINES = 2


class File(NamedTuple):
    """What nvcc wrote into one file, or printed.

    Attributes:
        path: below a root, as `kcache.nvcc.request.Roots.numbered` returns it; empty for what was
            printed.
        mode: its permissions; 1 for standard output, 2 for standard error.
        is_new: whether nvcc removes a file that is there, or else writes into it.
        form: how the paths of roots stand in it.
        content: its bytes.
    """

    path: str
    mode: int
    is_new: bool
    form: Form
    content: bytes


class Artifact(NamedTuple):
    """What one compile produced. Of a compile that failed, there are the log and the time.

    Attributes:
        ptx, cubin, ltoir: the outputs; None if the target has none of that kind.
        lowered_names: name expression -> mangled name.
        raw_log: the compiler's log as it returned it, NULs included; None if it has no text.
        seconds: wall time of the compile alone, without the wait for a worker.
        files: what nvcc wrote, in the order of their last changes; NVRTC writes none.
    """

    ptx: bytes | None = None
    cubin: bytes | None = None
    ltoir: bytes | None = None
    lowered_names: Mapping[str, str] = MappingProxyType({})
    raw_log: bytes | None = None
    seconds: float = 0.0
    files: tuple[File, ...] = ()

    @property
    def outputs(self) -> dict[str, bytes]:
        """The outputs by name, without those that the target does not have."""
        found = {"ptx": self.ptx, "cubin": self.cubin, "ltoir": self.ltoir}
        return {name: data for name, data in found.items() if data is not None}

    @property
    def log(self) -> str:
        """The compiler's log as text, warnings included."""
        return text_of_log(self.raw_log or b"")


def text_of_log(raw_log: bytes) -> str:
    """Return a log as text, without the NULs that NVRTC puts after the part of each tool."""
    return raw_log.decode(errors="replace").replace("\0", "").strip(" \n")
