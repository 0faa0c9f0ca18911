"""Registry: finds the class of a backend by its name, and opens it in a cache's directory."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, cast

from kcache.backend import GROUP, Backend, NoBackend, UnavailableBackend
from kcache.config import (
    DEFAULT_MAX_SIZE,
    Config,
    Setting,
    default_cache_directory,
    temporary_cache_directory,
)
from kcache.directory import CacheDirectory, prepare
from kcache.errors import BackendError, ConfigError, UnknownBackendError
from kcache.util import log

if TYPE_CHECKING:
    from kcache.engine.engine import CacheEngine
    from kcache.engine.journal import Journal
    from kcache.other_backends import Holder

__all__ = [
    "GROUP",
    "READ_SIZE",
    "Place",
    "backend_names",
    "backends_in",
    "holders",
    "open_as_set",
    "open_backend",
    "open_engine",
    "open_place",
    "require_backend",
    "settled",
    "with_known_backend",
]

#: The cap of a backend that is only read: its maker may have allowed larger files.
READ_SIZE = 1 << 34

#: First-party backends. They are found without a scan of entry points (which takes 15 to 50 ms).
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
    raise _unknown(name)


def _unknown(name: str) -> UnknownBackendError:
    known = ", ".join(backend_names())
    return UnknownBackendError(f"backend={name!r} is not known; allowed: {known}")


def require_backend(name: str) -> None:
    """Refuse a backend that is not installed.

    Raises:
        UnknownBackendError: it is not.
    """
    if name not in _FIRST_PARTY and name not in backend_names():
        raise _unknown(name)


class Place:
    """The place of a cache: its settings, its directory, and the backend that is opened there.

    Threads: safe to share.

    Args:
        config: the settings, with those that are saved in the directory.
        directory: None if none can be used.
        backend: of the cache.
        given: whether the program made the backend; then the directory is only for statistics.
    """

    def __init__(
        self, config: Config, directory: CacheDirectory | None, backend: Backend, *, given: bool
    ) -> None:
        self.config = config
        self.directory = directory
        self.backend = backend
        self.given = given
        #: The backend's name, or the class of a backend that the program made.
        self.name = type(backend).__name__ if given else config.backend.value
        #: Whether kcache has already checked if another backend holds the kernels.
        self._looked = given or config.disable.value

    @property
    def read_only(self) -> bool:
        """Whether nothing may be written."""
        return self.config.read_only.value or self.config.disable.value

    @property
    def path(self) -> str | None:
        """The path of the directory, or None."""
        return None if self.directory is None else self.directory.path

    def look_elsewhere(self) -> None:
        """Warn, at the first miss, if another backend has the directory's kernels."""
        if self._looked:
            return
        self._looked = True
        files = self.directory
        found = [] if files is None else holders(files, besides=self.name)
        if files is not None and found:
            from kcache.other_backends import warn_if_empty  # few calls need it

            warn_if_empty(self.backend, files, self.config.backend, found)


def open_place(arguments: Mapping[str, object], given: Backend | None) -> Place:
    """Return the place for the arguments and the environment, and log what is wrong with it.

    Args:
        arguments: settings by name.
        given: a backend that the program made.

    Raises:
        ConfigError, UnknownBackendError: as for `KernelCache`.
    """
    config = _load_settings(arguments, find_backend=given is None)
    if given is None:
        return _place_of(config)
    files = _prepared(config)
    if files is not None:
        config = settled(config, files, find_backend=False)
    return Place(config, files, given, given=True)


def _place_of(config: Config) -> Place:
    """Return a directory that is safe to use, and the backend in it.

    A directory that the program named must be safe, or ConfigError says why not. A wrong directory
    from the environment is no error: kcache logs a warning, and the cache works without a
    directory. It does the same if a directory can't be used for another reason. Of the default
    directories, it takes the first usable one.
    """
    named, source = config.directory
    if named is None and source != "default":
        return _nowhere(config, NoBackend(f"{source} is not allowed"))
    read_only = config.read_only.value or config.disable.value
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
                return _nowhere(config, NoBackend(reason))
        except BackendError as error:
            reason = str(error)
        else:
            files = CacheDirectory(directory)
            config = settled(config, files)
            backend = _backend_there(config, directory, read_only=read_only)
            return Place(config, files, backend, given=False)
        log.info("not usable: %s", reason)
    return _nowhere(config, UnavailableBackend(reason))


def _nowhere(config: Config, backend: Backend) -> Place:
    return Place(config, None, backend, given=False)


def _candidates(named: str | None) -> Iterator[str]:
    if named is not None:
        yield named
    else:
        # Each is looked up only if it is needed: finding all takes longer than a hit.
        yield str(default_cache_directory())
        yield temporary_cache_directory()


def _load_settings(arguments: Mapping[str, object], *, find_backend: bool) -> Config:
    """Return the settings of a cache, and log what is wrong with those of the environment.

    With `find_backend`, the backend is a registered one, unless the program named it.

    Raises:
        ConfigError: an argument is not allowed.
    """
    complaints: list[str] = []
    config = Config.load(arguments, complain=complaints.append)
    if config.log.value is not None:
        log.log_to_stderr(config.log.value)
    if find_backend:
        config = with_known_backend(config, complaints.append)
    for complaint in complaints:
        log.warning_once(complaint)
    return config


def settled(config: Config, files: CacheDirectory, *, find_backend: bool = True) -> Config:
    """Return the settings with those that are saved in a directory, and the backend that it has.

    If no setting names a backend and the default one has no folder, it is the one that has the
    entries.

    Args:
        config: as the program and the environment have it.
        files: of a directory that is safe.
        find_backend: whether the backend is one in that directory.
    """
    if os.path.lexists(files.settings):  # a hit without saved settings need not import this
        from kcache.saved_settings import read

        saved = read(files)
        for problem in saved.problems:
            log.warning_once(problem)
        config = saved.below(config)
        if find_backend:
            config = with_known_backend(config, log.warning_once)
    name, source = config.backend
    if find_backend and source == "default" and not os.path.isdir(files.backend(name)):
        for other in holders(files, besides=name):
            return config.replace(backend=Setting(other.name, "its entries"))
    return config


def holders(files: CacheDirectory, *, besides: str) -> list[Holder]:
    """Return the other backends that have entries in a directory, the one with the most first."""
    names = backends_in(files, besides=besides)
    if not names:
        return []
    from kcache.other_backends import look  # few calls need it

    def opened(name: str) -> Backend:
        return open_backend(name, files.path, max_size=READ_SIZE, read_only=True)

    return look(names, opened)


def backends_in(files: CacheDirectory, *, besides: str = "") -> list[str]:
    """Return the names of the backends that have a folder in a directory."""
    try:
        with os.scandir(files.path) as items:
            folders = {item.name for item in items if item.is_dir()}
    except OSError:  # the directory need not be readable if one can go through it
        folders = {name for name in _FIRST_PARTY if os.path.isdir(files.backend(name))}
    folders.discard(besides)
    if folders <= _FIRST_PARTY.keys():  # entry points are scanned only if necessary
        return sorted(folders)
    return sorted(folders.intersection(backend_names()))


def with_known_backend(config: Config, complain: Callable[[str], object]) -> Config:
    """Return the settings, with the default instead of a backend that is not registered.

    This applies to a name from the environment or from a directory's settings. A name from the
    program stays, and `open_backend` raises an error.
    """
    name, source = config.backend
    if source == "argument" or name in _FIRST_PARTY or name in backend_names():
        return config
    default = Setting("file", "default")
    known = ", ".join(backend_names())
    named = source if source.startswith("KCACHE_") else f"{source}: backend"
    complain(f"{named}={name!r} is not known; allowed: {known}. Until then it does not count")
    return config.replace(backend=default)


def _backend_there(config: Config, directory: str, *, read_only: bool) -> Backend:
    """Return the backend; if it refuses the directory (LMDB on NFS), one that says why.

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


def _prepared(config: Config) -> CacheDirectory | None:
    """Return a directory for the statistics, or None if there is none or it can't be used.

    Raises:
        ConfigError: the program named it, and it is unsafe.
    """
    directory, source = config.directory
    read_only = config.read_only.value or config.disable.value
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


def open_as_set(place: Place, producer: str, *, memory_size: int) -> CacheEngine:
    """Return the engine of a cache, with the settings of its place.

    Args:
        place: where it is.
        producer: of its entries.
        memory_size: of the memory tier, in bytes.
    """
    from kcache.engine.journal import Journal, limit_for

    files, config = place.directory, place.config
    journal = Journal(
        None if files is None or place.given else files.path,
        config.backend.value,
        read_only=place.read_only,
        limit=limit_for(config.max_size.value),
    )
    return _engine(
        config,
        place.backend,
        files,
        memory_size=memory_size,
        read_only=place.read_only,
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
