"""Owners: whose files are read as kernels, beside the present user's own."""

from __future__ import annotations

__all__ = ["trust", "trusted"]

#: Owners of the layers that the user has named: whoever may provide a layer is trusted with
#: kernels. Only reading goes by it; what is written belongs to the present user alone.
trusted: set[int] = set()


def trust(owner: int) -> None:
    """Have the files of a user read as kernels, in this process."""
    trusted.add(owner)
