"""Artifact: what one compile produced."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

from kcache.nvrtc import text_of_log


class Form(IntEnum):
    """How the stored content of a file represents the paths in it."""

    #: The paths are stored as nvcc wrote them.
    BINARY = 0
    #: The paths are stored in the form of `File.path`. Used for text, such as dependency lists.
    TEXT = 1
    #: The paths are replaced by marks of the same length. Used for files with line tables.
    LINES = 2


class File(NamedTuple):
    """What nvcc wrote to one file, or to a standard stream.

    Attributes:
        path: the file's path below a root, in the form that `kcache.nvcc.request.Roots` returns
            from `numbered_path`; empty for a standard stream.
        mode: the file's permissions; for a standard stream, 1 if it is standard output, or 2 if it
            is standard error.
        is_new: whether nvcc removes an existing file at the path first, instead of writing into it.
        form: how `content` represents paths.
        content: the bytes, with paths in that form.
    """

    path: str
    mode: int
    is_new: bool
    form: Form
    content: bytes


class Artifact(NamedTuple):
    """What one compile produced; after a failed compile, only the log and the time.

    Attributes:
        ptx, cubin, ltoir: the outputs; None for a kind of output that was not produced.
        lowered_names: name expression -> mangled name.
        raw_log: the log as the compiler returned it, NUL characters included; None if the log has
            no text.
        seconds: wall-clock time of the compile alone, without the wait for a worker.
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
        """The outputs that were produced, by name: `ptx`, `cubin`, `ltoir`."""
        found = {"ptx": self.ptx, "cubin": self.cubin, "ltoir": self.ltoir}
        return {name: data for name, data in found.items() if data is not None}

    @property
    def log(self) -> str:
        """The compiler's log as text, warnings included."""
        return text_of_log(self.raw_log or b"")
