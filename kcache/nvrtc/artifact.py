"""Artifact: what one compile produced."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

from kcache.nvrtc import text_of_log


class Form(IntEnum):
    """How the stored content of a file represents the paths in it."""

    #: As nvcc wrote them.
    BINARY = 0
    #: As in `File.path`; for a list of dependencies or source text.
    TEXT = 1
    #: As marks of the same length; for a line table.
    LINES = 2


class File(NamedTuple):
    """What nvcc wrote to one file, or to a standard stream.

    Attributes:
        path: below a root, as `kcache.nvcc.request.Roots.numbered_path` returns it; empty for a
            standard stream.
        mode: the file's permissions; for a stream, 1 for standard output, 2 for standard error.
        is_new: whether nvcc removes an existing file first, instead of writing into it.
        form: how the content represents paths.
        content: the bytes.
    """

    path: str
    mode: int
    is_new: bool
    form: Form
    content: bytes


class Artifact(NamedTuple):
    """What one compile produced; after a failed compile, only the log and the time.

    Attributes:
        ptx, cubin, ltoir: the outputs; None if the target has none of that kind.
        lowered_names: name expression -> mangled name.
        raw_log: the compiler's log as it returned it, NULs included; None if it has no text.
        seconds: wall time of the compile alone, without the wait for a worker.
        files: the files that nvcc wrote, in the order of their modification; empty for NVRTC.
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
