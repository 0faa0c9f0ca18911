"""kcache: a bounded, shared, observable cache for CUDA kernels that are compiled at run time.

Begin with `kcache.compile(source, arch="sm_90")`, which returns a `CompiledKernel` from the user's
cache. `KernelCache` does the same for a cache with its own directory, cap and statistics. Programs
that were not written for kcache can use it by `kcache.install()` or the command `kcache run`.

Each public name is imported from its module when it is first used (PEP 562), so that
`import kcache` takes almost no time.
"""

from __future__ import annotations

import os
from _thread import RLock  # `threading` is not loaded yet

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kcache._version import __version__
    from kcache.admin.bundles import export_bundle, import_bundle, list_bundle, verify_bundle
    from kcache.backend import Backend
    from kcache.dropin.install import install
    from kcache.engine.engine import CacheEngine
    from kcache.engine.opening import default_cache_directory, open_engine
    from kcache.engine.stats import Stats
    from kcache.entry import Entry
    from kcache.errors import (
        ArgumentTypeError,
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
        MissError,
        StaleKernelError,
        UnknownBackendError,
    )
    from kcache.kernel_cache import KernelCache, compile
    from kcache.kernels.compiled_kernel import CompiledKernel
    from kcache.kernels.explain import Explanation
    from kcache.kernels.resolver import compile_to_ptx
    from kcache.nvrtc.cuda_headers import include_paths
    from kcache.nvrtc.options import CompileOptions
    from kcache.nvrtc.request import CompileRequest, hash_options, hash_source

__all__ = [
    "ArgumentTypeError",
    "Backend",
    "BackendError",
    "BundleError",
    "CacheEngine",
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
    "Explanation",
    "KcacheError",
    "KernelCache",
    "MissError",
    "StaleKernelError",
    "Stats",
    "UnknownBackendError",
    "__version__",
    "compile",
    "compile_to_ptx",
    "default_cache_directory",
    "export_bundle",
    "hash_options",
    "hash_source",
    "import_bundle",
    "include_paths",
    "install",
    "list_bundle",
    "open_engine",
    "verify_bundle",
]

_MODULES = {
    "_version": ("__version__",),
    "backend": ("Backend",),
    "admin.bundles": ("export_bundle", "import_bundle", "list_bundle", "verify_bundle"),
    "dropin.install": ("install",),
    "engine.engine": ("CacheEngine",),
    "entry": ("Entry",),
    "errors": tuple(name for name in __all__ if name.endswith("Error")),
    "kernels.compiled_kernel": ("CompiledKernel",),
    "kernels.resolver": ("compile_to_ptx",),
    "kernel_cache": ("KernelCache", "compile"),
    "nvrtc.cuda_headers": ("include_paths",),
    "nvrtc.options": ("CompileOptions",),
    "nvrtc.request": ("CompileRequest", "hash_options", "hash_source"),
    "engine.opening": ("default_cache_directory", "open_engine"),
    "engine.stats": ("Stats",),
    "kernels.explain": ("Explanation",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

#: The lock that `kcache.util.forks` describes. It is made here, because it is already held while
#: that module is imported.
importing = RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(  # noqa: TID251  as above
        before=importing.acquire,
        after_in_parent=importing.release,
        after_in_child=importing.release,
    )


def __getattr__(name: str) -> object:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'kcache' has no attribute {name!r}")
    with importing:
        from importlib import import_module  # noqa: PLC0415  see above

        value = getattr(import_module(f"kcache.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
