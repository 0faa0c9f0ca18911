"""kcache: a bounded, shared, observable cache for CUDA kernels that are compiled at run time.

The public names are imported from their modules when they are first used (PEP 562), so that
`import kcache` costs an importer next to nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kcache._version import __version__
    from kcache.admin.bundle_import import Imported, import_bundle
    from kcache.admin.bundles import (
        BundleContents,
        Exported,
        export_bundle,
        list_bundle,
        verify_bundle,
    )
    from kcache.admin.miss_causes import Explanation
    from kcache.admin.request_diff import Cause
    from kcache.backend import Backend, EntryInfo, Usage
    from kcache.config import default_cache_directory
    from kcache.dropin.install import install
    from kcache.engine.engine import CacheEngine
    from kcache.engine.journal import Journal
    from kcache.engine.stats import Stats, StatsFile
    from kcache.entry import Entry
    from kcache.errors import (
        BackendError,
        BundleError,
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
    from kcache.kernel_cache import KernelCache
    from kcache.kernels.compiled_kernel import CompiledKernel
    from kcache.kernels.uncached import compile_to_ptx
    from kcache.nvrtc.key import CacheKey, hash_options, hash_source
    from kcache.nvrtc.options import CompileOptions
    from kcache.nvrtc.request import CompileRequest
    from kcache.registry import open_engine

__all__ = [
    "Backend",
    "BackendError",
    "BundleContents",
    "BundleError",
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
    "Exported",
    "Imported",
    "Journal",
    "KcacheError",
    "KernelCache",
    "StaleKernelError",
    "Stats",
    "StatsFile",
    "UnknownBackendError",
    "Usage",
    "__version__",
    "compile_to_ptx",
    "default_cache_directory",
    "export_bundle",
    "hash_options",
    "hash_source",
    "import_bundle",
    "install",
    "list_bundle",
    "open_engine",
    "verify_bundle",
]

_MODULES = {
    "_version": ("__version__",),
    "backend": ("Backend", "EntryInfo", "Usage"),
    "config": ("default_cache_directory",),
    "admin.bundle_import": ("Imported", "import_bundle"),
    "admin.bundles": (
        *("BundleContents", "Exported"),
        *("export_bundle", "list_bundle", "verify_bundle"),
    ),
    "admin.request_diff": ("Cause",),
    "dropin.install": ("install",),
    "engine.engine": ("CacheEngine",),
    "entry": ("Entry",),
    "errors": tuple(name for name in __all__ if name.endswith("Error")),
    "kernels.compiled_kernel": ("CompiledKernel",),
    "kernels.uncached": ("compile_to_ptx",),
    "kernel_cache": ("KernelCache",),
    "nvrtc.key": ("CacheKey", "hash_options", "hash_source"),
    "nvrtc.options": ("CompileOptions",),
    "nvrtc.request": ("CompileRequest",),
    "registry": ("open_engine",),
    "engine.journal": ("Journal",),
    "engine.stats": ("Stats", "StatsFile"),
    "admin.miss_causes": ("Explanation",),
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
    return sorted(__all__)
