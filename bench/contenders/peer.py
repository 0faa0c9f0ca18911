"""The peer: cuda.core, which is compared with where it can do the same."""

from importlib import import_module
from types import ModuleType


def peer_module(submodule: str = "") -> ModuleType:
    """Returns `cuda.core` or a submodule of it, such as ".utils".

    Raises RuntimeError, with the extra to install, where it is missing.
    """
    try:
        return import_module("cuda.core" + submodule)
    except ModuleNotFoundError as error:
        raise RuntimeError('cuda.core is not installed; install the extra "bench"') from error
