"""For authors of backends: the contract as tests, a model, and backends to test against.

`BackendContract` and `BackendMachine` need pytest and Hypothesis (the extra `testing`); the rest
needs no other package. Nothing else in kcache imports this package.
"""

from __future__ import annotations

import sys
from importlib import import_module

from kcache.testing.doubles import FakeClock, FaultyBackend, MemoryBackend, flipped, truncated
from kcache.util.hints import how_to_install

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kcache.testing.contract import BackendContract
    from kcache.testing.machine import BackendMachine

__all__ = [
    "BackendContract",
    "BackendMachine",
    "FakeClock",
    "FaultyBackend",
    "MemoryBackend",
    "flipped",
    "truncated",
]

#: The names that need pytest and Hypothesis, and the modules in which pytest explains failed
#: assertions.
_NEEDS_TOOLS = {"BackendContract": "contract", "BackendMachine": "machine"}
_EXPLAINED = (*_NEEDS_TOOLS.values(), "_base", "_processes")


def __getattr__(name: str) -> object:
    if name not in _NEEDS_TOOLS:
        raise AttributeError(f"module 'kcache.testing' has no attribute {name!r}")
    _require()
    value = getattr(import_module(f"kcache.testing.{_NEEDS_TOOLS[name]}"), name)
    globals()[name] = value
    return value


def _require() -> None:
    """Raise an ImportError that says what to install, if pytest or Hypothesis is missing."""
    try:
        import hypothesis  # noqa: F401, PLC0415  # pyright: ignore[reportUnusedImport]
        import pytest  # noqa: F401, PLC0415  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise ImportError(
            f"{error.name} is missing: {how_to_install('testing')}", name=error.name
        ) from error


# Let pytest explain failed assertions in the modules that are imported from here.
if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite(*(f"{__name__}.{name}" for name in _EXPLAINED))
