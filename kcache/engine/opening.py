"""OpenedBackend: the directory, the backend and the settings of a cache, found and opened.

An argument overrides the environment, which overrides what is saved in the directory, which
overrides the default.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from kcache.backend import Backend, NoBackend, is_backend, open_backend
from kcache.config import (
    DEFAULT_MAX_SIZE,
    Config,
    Setting,
    parse_directory,
)
from kcache.directory import CacheDirectory, is_usable, open_directory
from kcache.engine.stats import StatsFile
from kcache.environment import default_directories, variable
from kcache.errors import BackendError, ConfigError, KcacheError
from kcache.util import log
from kcache.util.forks import importing
from kcache.util.path_safety import why_no_user

if TYPE_CHECKING:
    from pathlib import Path

    from kcache.engine.engine import CacheEngine

#: The cap given to a backend that is only read, because programs with a larger cap may have written
#: it.
READ_SIZE = 1 << 33
#: Directories in which `warn_of_other_backend` has looked.
_looked: set[str] = set()
_IN_MEMORY = "This process caches in memory alone"


class OpenedBackend(NamedTuple):
    """A backend that is open, with its directory and its settings. Threads: safe to share.

    Attributes:
        config: the settings, including those that are saved in the directory.
        directory: the cache's directory; None if none can be used.
        backend: of the cache; a `NoBackend` if there is no directory.
        given: whether the program made the backend; then the directory is only for statistics.
    """

    config: Config
    directory: CacheDirectory | None
    backend: Backend
    given: bool = False

    @property
    def name(self) -> str:
        """The backend's name, or the class of a backend that the program made."""
        return type(self.backend).__name__ if self.given else self.config.backend.value

    @property
    def path(self) -> str | None:
        """The path of the directory, or None."""
        return None if self.directory is None else self.directory.path


# -- a cache by arguments and environment ----------------------------------------------------------


def open_configured(
    arguments: Mapping[str, object],
    given: Backend | None,
    complain: Callable[[str], object] = log.warning_once,
) -> OpenedBackend:
    """Open the backend that the arguments and the environment name; warn of what is wrong.

    An unsafe directory is a ConfigError if the program named it. An unsafe directory of the
    environment, or one that can't be used for another reason, causes a warning, and the cache works
    without a directory. Of the default directories, the first usable one is taken.

    Args:
        arguments: settings by name.
        given: a backend that the program made; closed with the cache.
        complain: called with a sentence for each problem.

    Raises:
        ConfigError, UnknownBackendError: an argument is not allowed.
    """
    config, directory = find_cache(arguments, given, complain=complain)
    if isinstance(directory, NoBackend):
        return OpenedBackend(config, None, given or directory, given is not None)
    backend = given or _open_backend(config, directory, complain)
    return OpenedBackend(config, directory, backend, given is not None)


def find_cache(
    arguments: Mapping[str, object],
    given: Backend | None = None,
    *,
    look: bool = False,
    complain: Callable[[str], object] | None = log.warning_once,
) -> tuple[Config, CacheDirectory | NoBackend]:
    """Return the settings and the directory of a cache, or a `NoBackend` with the reason.

    Args:
        arguments, given, complain: as for `open_configured`; so are the errors. With None, what is
            wrong in the environment is an error, too.
        look: whether to change nothing, whatever the settings are.
    """
    complaints: list[str] = []
    config = Config.load(arguments, complain=complaints.append if complain else None)
    if config.log.value is not None:
        log.log_to_stderr(config.log.value)
    warn = complain or (lambda _: None)  # what is wrong with saved settings is never an error
    for complaint in complaints:
        warn(complaint)
    read_only = look or config.forbids_writing
    directory = _find_directory(config, given, read_only, warn)
    if isinstance(directory, NoBackend):
        if complain is None and directory.kind == "refused":
            raise ConfigError(f"{config.directory.source}: {directory.reason}")
        return config, directory
    return config.with_saved(directory.settings, directory.marker, warn), directory


def _find_directory(
    config: Config, given: Backend | None, read_only: bool, complain: Callable[[str], object]
) -> CacheDirectory | NoBackend:
    """Return the directory of a cache, or a `NoBackend` with the reason.

    Raises:
        ConfigError: the program named a directory that is not safe or not ours.
    """
    named, source = config.directory
    if named is None and source != "default":  # the variable is not a path: a warning was logged
        return NoBackend(f"{source} is not allowed", kind="refused")
    path, missing = "", NoBackend("no directory")
    if named is None and given is not None:
        return missing
    paths: Iterable[str] = default_directories()
    if named is not None or read_only:  # a reader finds the same directory as those that write
        paths = [default_directory() if named is None else named]
    for path in paths:
        try:
            return open_directory(path, read_only=read_only)
        except ConfigError as error:
            if source == "argument":
                raise
            kind = "unusable" if named is None else "refused"
            missing = NoBackend(str(error), kind=kind)
        except BackendError as error:
            missing = NoBackend(str(error))
        if not read_only or os.path.lexists(path):
            log.info("not usable: %s", missing.reason)
    if read_only and not os.path.lexists(path) and not why_no_user():
        return NoBackend("nothing has been cached yet", kind="no_cache")
    where = "" if named is None else f"{source}: "
    effect = _IN_MEMORY if given is None else "No statistics are written"
    complain(f"{where}{missing.reason}. {effect}")
    return missing


def default_directory() -> str:
    """Return the default directory that programs use, or would make. Nothing is created."""
    return next(filter(is_usable, default_directories()), None) or next(default_directories())


def default_cache_directory() -> Path:
    r"""Return the default directory of the cache, below the platform's user cache directory.

    `$XDG_CACHE_HOME/kcache` or `~/.cache/kcache` on Linux, `~/Library/Caches/kcache` on macOS,
    `%LOCALAPPDATA%\kcache\Cache` on Windows; `KCACHE_DIR` where that is set. Nothing is created.
    """
    with importing:
        from pathlib import Path  # noqa: PLC0415  4 ms

    named = variable("KCACHE_DIR")
    return Path(parse_directory(named, name="KCACHE_DIR") if named else next(default_directories()))


def _open_backend(
    config: Config, directory: CacheDirectory, complain: Callable[[str], object]
) -> Backend:
    """Return the backend; if it rejects the directory (LMDB on NFS), one that stores nothing.

    Raises:
        ConfigError: the backend rejects a cap that the program gave. For a cap of the environment,
            it causes a warning.
        UnknownBackendError: the program named a backend that is not installed.
    """
    name, (max_size, source) = config.backend.value, config.max_size
    folder, read_only = directory.backend(name), config.forbids_writing
    try:
        return open_backend(name, folder, max_size=max_size, read_only=read_only)
    except ConfigError as error:
        if source == "argument":
            raise
        reason = f"{source}: {error}"
    except BackendError as error:
        reason = str(error)
    complain(f"{reason}. {_IN_MEMORY}")
    return NoBackend(reason)


# -- which backend ---------------------------------------------------------------------------------


def backends_in(directory: CacheDirectory) -> list[str]:
    """Return the names of the backends that have a folder in a directory.

    Raises:
        OSError: it can't be listed.
    """
    with os.scandir(directory.path) as items:
        return sorted(item.name for item in items if item.is_dir() and is_backend(item.name))


def warn_of_other_backend(opened: OpenedBackend) -> None:
    """Log one warning if the backend has no entries, and another one has a folder.

    Each process checks each directory once.
    """
    directory = opened.directory
    if directory is None or opened.given or directory.path in _looked:
        return
    _looked.add(directory.path)
    sentence = other_backend_hint(directory, opened.config.backend, opened.backend)
    if sentence:
        log.warning_once(sentence)


def other_backend_hint(directory: CacheDirectory, named: Setting[str], backend: Backend) -> str:
    """Return a sentence if a backend has no entries, and another one has a folder; else nothing.

    Args:
        directory: has the folders of both.
        named: the name of the backend, with the source of the setting.
        backend: the backend itself.
    """
    name, source = named
    try:
        others = [each for each in backends_in(directory) if each != name]
        if not others or backend.usage().entries:
            return ""
    except (KcacheError, OSError):
        return ""
    why, other = "the default" if source == "default" else f"{source} names it", others[0]
    return (
        f"{directory.path}: the backend {name} ({why}) is empty, and there is a folder of "
        f"{' and '.join(others)}. To use it, set KCACHE_BACKEND={other}, or kcache config --set "
        f"backend={other}; to move its entries: kcache migrate --from {other} --to {name}"
    )


# -- engines ---------------------------------------------------------------------------------------


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
    backend. The engine adds its counts to the directory's statistics. Settings of the environment
    and those saved in the directory are ignored.

    Raises:
        ConfigError: a size is not allowed, or the directory is unsafe.
        UnknownBackendError: no such backend is installed.
        BackendError: the backend can't be opened there.
    """
    arguments = {
        "directory": directory,
        "backend": backend,
        "max_size": max_size,
        "memory_size": memory_size,
        "read_only": read_only,
    }
    config = Config.load(arguments, environ={})
    files = open_directory(str(config.directory.value), read_only=read_only)
    name, cap = config.backend.value, config.max_size.value
    opened = open_backend(name, files.backend(name), max_size=cap, read_only=read_only)
    return engine_of(OpenedBackend(config, files, opened), config.memory_size.value)


def engine_of(opened: OpenedBackend, memory_size: int, *, producer: str = "") -> CacheEngine:
    """Return an engine over an opened backend, with the files of its directory.

    Args:
        opened: the backend, which the engine closes.
        memory_size: of the memory tier, in bytes.
        producer: of its entries; without one, the engine has no journal.
    """
    with importing:  # `kcache doctor` runs without xxhash
        from kcache.engine.engine import CacheEngine  # noqa: PLC0415

    config, files = opened.config, opened.directory
    read_only, cap = config.forbids_writing, config.max_size.value

    return CacheEngine(
        opened.backend,
        max_size=cap,
        memory_size=memory_size,
        producer=producer,
        read_only=read_only,
        stats_file=None if read_only or files is None else StatsFile(files.stats),
        lock_file=None if files is None else files.flight,
        wait=config.wait.value,
        journal=None if files is None or opened.given or not producer else files.path,
        name=config.backend.value,
    )
