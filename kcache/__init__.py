"""kcache: a bounded, shared, observable cache for CUDA kernels that are compiled at run time."""

from __future__ import annotations

from kcache._version import __version__
from kcache.backend import Backend, EntryInfo, Usage
from kcache.config import default_cache_directory
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
    KcacheError,
    StaleKernelError,
    UnknownBackendError,
)
from kcache.kernel import CompiledKernel
from kcache.kernel_cache import KernelCache, compile_to_ptx, open_engine
from kcache.key import CacheKey, hash_options, hash_source
from kcache.nvrtc.options import CompileOptions
from kcache.stats import Stats

__all__ = [
    "Backend",
    "BackendError",
    "CacheEngine",
    "CacheKey",
    "CompileError",
    "CompileOptionError",
    "CompileOptions",
    "CompiledKernel",
    "CompilerNotFoundError",
    "ConfigError",
    "CorruptEntryError",
    "DeviceError",
    "Entry",
    "EntryInfo",
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
    "open_engine",
]
