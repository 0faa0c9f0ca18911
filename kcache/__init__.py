"""kcache: a bounded, shared, observable cache for CUDA kernels that are compiled at run time.

The public names are imported from their modules when they are first used (PEP 562), so that
`import kcache` costs an importer next to nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kcache._version import __version__
    from kcache.backend import Backend, EntryInfo, Usage
    from kcache.config import default_cache_directory
    from kcache.contrast import Cause
    from kcache.dropin.install import install
    from kcache.engine import CacheEngine
    from kcache.entry import Entry
    from kcache.errors import (
        BackendError,
        CompileError,
        CompileOptionError,
        CompilerNotFoundError,
        ConfigError,
        CorruptEntryError,
        DeviceError,
        DropinError,
        KcacheError,
        StaleKernelError,
        UnknownBackendError,
    )
    from kcache.kernel import CompiledKernel
    from kcache.kernel_cache import KernelCache, compile_to_ptx, open_engine
    from kcache.key import CacheKey, hash_options, hash_source
    from kcache.nvrtc.options import CompileOptions
    from kcache.requests import CompileRequest
    from kcache.stats import Stats
    from kcache.why import Explanation

__all__ = [
    "Backend",
    "BackendError",
    "CacheEngine",
    "CacheKey",
    "Cause",
    "CompileError",
    "CompileOptionError",
    "CompileOptions",
    "CompileRequest",
    "CompiledKernel",
    "CompilerNotFoundError",
    "ConfigError",
    "CorruptEntryError",
    "DeviceError",
    "DropinError",
    "Entry",
    "EntryInfo",
    "Explanation",
    "KcacheError",
    "KernelCache",
    "StaleKernelError",
    "Stats",
    "UnknownBackendError",
    "Usage",
    "__version__",
    "compile_to_ptx",
    "default_cache_directory",
    "hash_options",
    "hash_source",
    "install",
    "open_engine",
]

_MODULES = {
    "_version": ("__version__",),
    "backend": ("Backend", "EntryInfo", "Usage"),
    "config": ("default_cache_directory",),
    "contrast": ("Cause",),
    "dropin.install": ("install",),
    "engine": ("CacheEngine",),
    "entry": ("Entry",),
    "errors": tuple(name for name in __all__ if name.endswith("Error")),
    "kernel": ("CompiledKernel",),
    "kernel_cache": ("KernelCache", "compile_to_ptx", "open_engine"),
    "key": ("CacheKey", "hash_options", "hash_source"),
    "nvrtc.options": ("CompileOptions",),
    "requests": ("CompileRequest",),
    "stats": ("Stats",),
    "why": ("Explanation",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'kcache' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"kcache.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
