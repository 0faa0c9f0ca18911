"""ToldEnvironment: the variables and the working directory that the compiler is told."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["ToldEnvironment"]

#: Answers that kcache gives itself, whatever the program's environment says: a worker takes no part
#: in the program's `make`, and NVRTC's own cache would answer instead of the compiler.
_FIXED: dict[bytes, bytes | None] = {b"MAKEFLAGS": None, b"CUDA_CACHE_DISABLE": b"1"}
_PWD = b"PWD"
#: Variables that say where temporary files go. A cached outcome does not depend on them.
_ASIDE = (b"TMPDIR", b"TMP", b"TEMP")


class ToldEnvironment:
    """What a compiler is told of the program's environment.

    Attributes:
        asked: variable -> value, of all compiles so far: the compiler remembers some of them.
    """

    def __init__(self) -> None:
        self.asked: dict[bytes, bytes | None] = {}
        self._variables: Mapping[bytes, bytes] = {}
        self._directory = b"/"

    def begin(self, variables: Mapping[bytes, bytes], directory: bytes) -> None:
        """Use these for the next compile."""
        self._variables = variables
        self._directory = directory

    def tell(self, name: bytes) -> bytes | None:
        """Return the value of a variable for the compiler; None if it is not set."""
        value = self._value(name, self._variables, self._directory)
        if name not in _FIXED and name not in _ASIDE:
            self.asked[name] = value
        return value

    def told_otherwise(self, variables: Mapping[bytes, bytes], directory: bytes) -> bool:
        """Tell whether the compiler got other values of these variables before."""
        return any(
            self._value(name, variables, directory) != value for name, value in self.asked.items()
        )

    def _value(
        self, name: bytes, variables: Mapping[bytes, bytes], directory: bytes
    ) -> bytes | None:
        if name in _FIXED:
            return _FIXED[name]
        value = variables.get(name)
        if name == _PWD and (value is None or not _same(value, directory)):
            # LLVM asks for it to learn how the user spells the working directory. If it names
            # another directory, LLVM uses `getcwd`.
            return directory
        return value


def _same(path: bytes, directory: bytes) -> bool:
    """Tell whether an absolute path leads to the directory, in any spelling."""
    if path == directory:
        return True
    if not path.startswith(b"/"):
        return False
    try:
        return os.path.samefile(path, directory)
    except OSError:
        return False
