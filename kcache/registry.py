"""The registry: from the name of a backend to the class behind it, and to a cache's directory."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from kcache.backend import GROUP, Backend, NoBackend, UnavailableBackend
from kcache.config import (
    DEFAULT_MAX_SIZE,
    Config,
    Setting,
    default_cache_directory,
    temporary_cache_directory,
)
from kcache.directory import CacheDirectory, prepare, prepare_layer
from kcache.errors import BackendError, ConfigError, KcacheError, UnknownBackendError
from kcache.util import log

if TYPE_CHECKING:
    from kcache.engine.engine import CacheEngine
    from kcache.engine.journal import Journal
    from kcache.remote.address import Address
    from kcache.remote.layer import Layer

__all__ = [
    "GROUP",
    "backend_names",
    "load_settings",
    "open_as_set",
    "open_backend",
    "open_engine",
    "open_layers",
]

#: The cap that a layer is read with: its files may be as large as whoever made it allowed.
_LAYER_SIZE = 1 << 34

#: First-party backends, found without scanning entry points (which costs 15 to 50 ms).
_FIRST_PARTY = {
    "file": "kcache_backends.file:FileBackend",
    "lmdb": "kcache_backends.lmdb:LmdbBackend",
    "zstd": "kcache_backends.zstd:zstd_file",
    "zstd+lmdb": "kcache_backends.zstd:zstd_lmdb",
}


def backend_names() -> list[str]:
    """Return the names of every backend that is installed, sorted."""
    from importlib.metadata import entry_points

    return sorted({*_FIRST_PARTY, *entry_points(group=GROUP).names})


def open_backend(name: str, directory: str, *, max_size: int, read_only: bool = False) -> Backend:
    """Open the backend called `name` in its own directory below `directory`.

    Raises:
        UnknownBackendError: no backend of that name is installed.
        BackendError: it can't be opened there, or imported.
    """
    try:
        factory = cast("Callable[..., Backend]", _load(name))
    except ImportError as error:
        raise BackendError(f"backend {name} can't be imported: {error}") from error
    return factory(CacheDirectory(directory).backend(name), max_size=max_size, read_only=read_only)


def _load(name: str) -> object:
    target = _FIRST_PARTY.get(name)
    if target is not None:
        module, _, attribute = target.partition(":")
        return getattr(importlib.import_module(module), attribute)
    from importlib.metadata import entry_points

    for point in entry_points(group=GROUP, name=name):
        return point.load()
    raise UnknownBackendError(
        f"backend={name!r} is not known; allowed: {', '.join(backend_names())}"
    )


def _open_place(config: Config, *, read_only: bool) -> tuple[CacheDirectory | None, Backend]:
    """Return a directory that is safe to use, and the backend in it.

    A directory that the program named must be safe, or ConfigError says why not. What the
    environment named is no error: kcache logs a warning, and the cache does without a directory.
    It does so, too, where a directory can't be used for another reason. Of the defaults the first
    usable is taken.
    """
    named, source = config.directory
    if named is None and source != "default":
        return None, NoBackend(f"{source} is not allowed")
    reason = "no directory"
    for directory in _candidates(named):
        try:
            prepare(directory, read_only=read_only)
        except ConfigError as error:
            if named is not None and source == "argument":
                raise
            reason = str(error)
            if named is not None:
                log.warning_once(
                    f"{source}: {reason}. Until then this process caches in memory alone"
                )
                return None, NoBackend(reason)
        except BackendError as error:
            reason = str(error)
        else:
            backend = _backend_there(config, directory, read_only=read_only)
            return CacheDirectory(directory), backend
        log.info("not usable: %s", reason)
    return None, UnavailableBackend(reason)


def _candidates(named: str | None) -> Iterator[str]:
    if named is not None:
        yield named
    else:  # each only if it is needed: to find them takes a fresh process longer than a hit
        yield str(default_cache_directory())
        yield temporary_cache_directory()


def load_settings(arguments: Mapping[str, object], *, find_backend: bool) -> Config:
    """Return the settings of a cache, and log what is wrong with those of the environment.

    With `find_backend`, the backend is one that is registered, if the program did not name it.

    Raises:
        ConfigError: an argument is not allowed.
    """
    complaints: list[str] = []
    config = Config.load(arguments, complain=complaints.append)
    if config.log.value is not None:
        log.log_to_stderr(config.log.value)
    if find_backend:
        config = _with_known_backend(config, complaints.append)
    for complaint in complaints:
        log.warning_once(complaint)
    return config


def _with_known_backend(config: Config, complain: Callable[[str], object]) -> Config:
    """Return the settings, with the default in place of a backend that nobody has registered.

    That is for a name from the environment. One that the program gave stays, and `open_backend`
    raises an error.
    """
    name, source = config.backend
    if source == "argument" or name in _FIRST_PARTY or name in backend_names():
        return config
    default = Setting("file", "default")
    known = ", ".join(backend_names())
    complain(f"{source}={name!r} is not known; allowed: {known}. Until then the default is used")
    return config.replace(backend=default)


def _backend_there(config: Config, directory: str, *, read_only: bool) -> Backend:
    """Return the backend, or, where it refuses the place (LMDB on NFS), one that says why.

    Raises:
        ConfigError: it refuses a cap that the program gave; one of the environment is a warning.
    """
    name, (max_size, source) = config.backend.value, config.max_size
    try:
        return open_backend(name, directory, max_size=max_size, read_only=read_only)
    except UnknownBackendError:
        raise
    except ConfigError as error:
        if source == "argument":
            raise
        log.warning_once(f"{source}: {error}. Until then this process caches in memory alone")
        return UnavailableBackend(str(error))
    except BackendError as error:
        return UnavailableBackend(str(error))


def _prepared(config: Config, read_only: bool) -> CacheDirectory | None:
    """Return a directory for the statistics, or None where there is none or it can't be used.

    Raises:
        ConfigError: the program named it, and it is unsafe.
    """
    directory, source = config.directory
    if directory is not None:
        try:
            prepare(directory, read_only=read_only)
        except ConfigError as error:
            if source == "argument":
                raise
            log.warning_once(f"{source}: {error}. No statistics are written")
            return None
        except BackendError as error:
            log.info("not usable: %s", error)
            return None
    return None if directory is None else CacheDirectory(directory)


def open_layers(
    addresses: Sequence[Address], *, strict: bool, key_file: str | None = None
) -> list[Layer]:
    """Return the layers among the addresses of tiers, in order.

    One that can't be used is left out, with a warning. With a file of keys that sign, so is a
    bundle that is not signed.

    Raises:
        ConfigError: one is not safe, or no cache; only if `strict`.
    """
    layers: list[Layer] = []
    for address in addresses:
        if address.kind != "layer":
            continue
        try:
            layers.append(_open_layer(address, key_file))
        except ConfigError as error:
            if strict:
                raise
            log.warning_once(f"{error}. Until then the cache works without it")
        except (KcacheError, OSError) as error:
            log.warning_once(f"{error}. The cache works without this layer")
    return layers


def _open_layer(address: Address, key_file: str | None) -> Layer:
    """Return a layer.

    Raises:
        ConfigError, BackendError: it can't be used.
    """
    from kcache.remote.layer import DirectoryLayer

    path = address.path
    prepare_layer(path)
    if os.path.isfile(path):
        from kcache.remote.bundle_layer import BundleLayer

        return BundleLayer(path, keep=address.keep, key_file=key_file)
    named = address.option("backend")

    def there(names: Iterable[str]) -> list[str]:
        return [name for name in names if os.path.isdir(CacheDirectory(path).backend(name))]

    # Entry points are scanned only where it must be.
    found = [named] if named else there(_FIRST_PARTY) or there(backend_names())
    if not found:
        raise BackendError(f"layer {path} has no entries in it")
    # One engine wrote one of them; where there are several, all that they hold is offered.
    backends = [open_backend(n, path, max_size=_LAYER_SIZE, read_only=True) for n in found]
    return DirectoryLayer(path, backends, keep=address.keep)


def open_engine(
    directory: str | os.PathLike[str],
    *,
    backend: str = "file",
    max_size: int | str = DEFAULT_MAX_SIZE,
    memory_size: int | str = 0,
    read_only: bool = False,
) -> CacheEngine:
    """Return an engine over the backend called `backend`, in `directory`.

    Sizes are in bytes, or text such as `"512MB"`. With `memory_size=0` every get reaches the
    backend. The engine counts into the directory's statistics.

    Raises:
        ConfigError: a size is not allowed, or the directory is unsafe.
        UnknownBackendError: no such backend is installed.
        BackendError: the backend can't be opened there.
    """
    config = Config.load(
        {
            "directory": directory,
            "backend": backend,
            "max_size": max_size,
            "memory_size": memory_size,
        },
        environ={},
    )
    place = config.directory.value
    assert place is not None
    prepare(place, read_only=read_only)
    max_size = config.max_size.value
    opened = open_backend(config.backend.value, place, max_size=max_size, read_only=read_only)
    memory = config.memory_size.value
    files = CacheDirectory(place)
    return _engine(config, opened, files, memory_size=memory, read_only=read_only)


def open_as_set(
    config: Config, given: Backend | None, *, memory_size: int, producer: str
) -> tuple[CacheDirectory | None, CacheEngine]:
    """Return the directory that the settings lead to, if there is one, and the engine of a cache.

    `given` is a backend that the program made; then the directory is for the statistics alone.

    Raises:
        ConfigError: as for `KernelCache`.
        UnknownBackendError: as for `KernelCache`.
    """
    from kcache.engine.journal import Journal, limit_for

    read_only = config.read_only.value or config.disable.value
    if given is None:
        files, opened = _open_place(config, read_only=read_only)
    else:
        files, opened = _prepared(config, read_only), given
    journal = Journal(
        files.path if files is not None and given is None else None,
        config.backend.value,
        read_only=read_only,
        limit=limit_for(config.max_size.value),
    )
    return files, _engine(
        config,
        opened,
        files,
        memory_size=memory_size,
        read_only=read_only,
        producer=producer,
        journal=journal,
    )


def _engine(
    config: Config,
    backend: Backend,
    files: CacheDirectory | None,
    *,
    memory_size: int,
    read_only: bool,
    producer: str = "",
    journal: Journal | None = None,
) -> CacheEngine:
    """Return an engine over a backend, whose processes share the files of a directory."""
    from kcache.engine.engine import CacheEngine
    from kcache.engine.stats import StatsFile

    return CacheEngine(
        backend,
        max_size=config.max_size.value,
        memory_size=memory_size,
        producer=producer,
        read_only=read_only,
        stats_file=None if read_only or files is None else StatsFile(files.stats),
        lock_file=None if files is None else files.flight,
        wait=config.wait.value,
        journal=journal,
    )
