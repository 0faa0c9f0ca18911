"""For authors of backends: the contract as tests, a model, and backends to test against.

`BackendContract` needs pytest and Hypothesis, `run_cache_machine` Hypothesis, the rest nothing:
the extra `testing`. Nothing else in kcache imports this package.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kcache.testing.clock import FakeClock
    from kcache.testing.contract import BackendContract
    from kcache.testing.faulty import Fault, FaultyBackend, flipped, truncated
    from kcache.testing.machine import CacheMachine, HarmedMachine, run_cache_machine
    from kcache.testing.memory import MemoryBackend

__all__ = [
    "BackendContract",
    "CacheMachine",
    "FakeClock",
    "Fault",
    "FaultyBackend",
    "HarmedMachine",
    "MemoryBackend",
    "flipped",
    "run_cache_machine",
    "truncated",
]

_MODULES = {
    "clock": ("FakeClock",),
    "contract": ("BackendContract",),
    "faulty": ("Fault", "FaultyBackend", "flipped", "truncated"),
    "machine": ("CacheMachine", "HarmedMachine", "run_cache_machine"),
    "memory": ("MemoryBackend",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
_NEEDS_TOOLS = ("contract", "machine")
_EXPLAINED = (
    *_NEEDS_TOOLS,
    *("_base", "_batches", "_children", "_processes", "_recency", "_threads", "_trouble"),
    *("_usage", "_values"),
)


def __getattr__(name: str) -> object:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'kcache.testing' has no attribute {name!r}")
    if module in _NEEDS_TOOLS:
        _require()
    from importlib import import_module

    value = getattr(import_module(f"kcache.testing.{module}"), name)
    globals()[name] = value
    return value


def _require() -> None:
    """Say what to install if the tools are missing."""
    try:
        import hypothesis  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import pytest  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        from kcache.util.distribution import how_to_install

        raise ImportError(
            f"{error.name} is missing: {how_to_install('testing')}", name=error.name
        ) from error


# Let pytest explain failed assertions in the modules that are imported from here.
if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite(*(f"{__name__}.{name}" for name in _EXPLAINED))
