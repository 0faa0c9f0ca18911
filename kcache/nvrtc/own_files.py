"""Own files: recognises paths that lead each process to files of its own."""

from __future__ import annotations

import re

__all__ = ["are_own_files"]

#: Matches the beginning of a path, but not a division by a variable with the name `proc`.
_own = re.compile(
    rb"/(?:(?<=[\s\"'<=(,]/)|(?<=\A/)|(?<=-I/))(?:dev/std|(?:proc|dev/fd)(?:/|\Z))"
).search


def are_own_files(text: bytes) -> bool:
    """Tell whether a text has a path in it such as `/proc/self/fd/3` or `/dev/stdin`.

    In another process, such a path leads to another file, or to none.
    """
    return _own(text) is not None
