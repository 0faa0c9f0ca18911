"""OpenedBackend: finds and opens a cache: its settings, its directory and its backend.

Arguments override the environment, the environment overrides settings that are saved in the
directory, and saved settings override the defaults.
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

#: The cap with which a backend is opened that is only read. It is large, because programs with a
#: larger cap than this one's may have written to the backend.
READ_SIZE = 1 << 33
#: The directories that `warn_of_other_backend` has already examined.
_looked: set[str] = set()
_IN_MEMORY = "This process caches in memory alone"


class OpenedBackend(NamedTuple):
    """An open backend, with its directory and its settings.

    Threads: an OpenedBackend may be used by several threads at the same time.

    Attributes:
        config: the settings, including those that are saved in the directory.
        directory: the cache's directory, or None if there is no usable directory.
        backend: the backend; a `NoBackend` if there is no usable directory, or if the backend in it
            can't be opened.
        given: whether the program made the backend and passed it to kcache. The directory is then
            used for statistics and locks, but not for entries.
    """

    config: Config
    directory: CacheDirectory | None
    backend: Backend
    given: bool = False

    @property
    def name(self) -> str:
        """The backend's name; for a backend that the program made, the name of its class."""
        return type(self.backend).__name__ if self.given else self.config.backend.value

    @property
    def path(self) -> str | None:
        """The path of the directory, or None if there is no usable directory."""
        return None if self.directory is None else self.directory.path


# -- opening a cache by arguments and environment --------------------------------------------------


def open_configured(
    arguments: Mapping[str, object],
    given: Backend | None,
    complain: Callable[[str], object] = log.warning_once,
) -> OpenedBackend:
    """Open the backend that the arguments and the environment name.

    If the program named an unsafe directory, this raises a ConfigError. If the environment names an
    unsafe directory, or if a directory can't be used for another reason, `complain` is called, and
    the cache works without a directory. If no directory is named, the first usable default
    directory is used.

    Args:
        arguments: maps the names of settings to their values.
        given: a backend that the program made, or None; closed when the cache is closed.
        complain: called with a sentence for each problem; by default, it logs a warning.

    Raises:
        ConfigError: an argument is not allowed, or names an unsafe directory.
        UnknownBackendError: an argument names a backend that is not installed.
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
    """Return the settings of a cache, and its directory or a `NoBackend` saying why there is none.

    Args:
        arguments: maps the names of settings to their values.
        given: a backend that the program made, or None.
        look: whether to open the directory for reading only, whatever the settings are.
        complain: called with a sentence for each problem. With None, a problem with the environment
            raises an error instead.

    Raises:
        ConfigError, UnknownBackendError: the same errors as for `open_configured`.
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
    """Return the directory of a cache, or a `NoBackend` saying why there is no usable directory.

    Raises:
        ConfigError: the program named a directory that is unsafe or belongs to another program.
    """
    named, source = config.directory
    if named is None and source != "default":  # the variable is not a path: a warning was logged
        return NoBackend(f"the value of {source} is not allowed", kind="refused")
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
            log.info("a directory is not usable: %s", missing.reason)
    if read_only and not os.path.lexists(path) and not why_no_user():
        return NoBackend("nothing has been cached yet", kind="no_cache")
    where = "" if named is None else f"{source}: "
    effect = _IN_MEMORY if given is None else "This process writes no statistics"
    complain(f"{where}{missing.reason}. {effect}")
    return missing


def default_directory() -> str:
    """Return the first default directory that is usable, even if it does not exist yet.

    If none is usable, return the first default directory. Nothing is created.
    """
    return next(filter(is_usable, default_directories()), None) or next(default_directories())


def default_cache_directory() -> Path:
    r"""Return the directory that a cache uses by default. Nothing is created.

    This is the value of `KCACHE_DIR`, if that is set. Otherwise it is `$XDG_CACHE_HOME/kcache` or
    `~/.cache/kcache` on Linux, `~/Library/Caches/kcache` on macOS, and
    `%LOCALAPPDATA%\kcache\Cache` on Windows. Without a home directory, it is a directory for
    temporary files.
    """
    with importing:
        from pathlib import Path  # noqa: PLC0415  4 ms

    named = variable("KCACHE_DIR")
    return Path(parse_directory(named, name="KCACHE_DIR") if named else next(default_directories()))


def _open_backend(
    config: Config, directory: CacheDirectory, complain: Callable[[str], object]
) -> Backend:
    """Open the backend that `config` names; return it, or a `NoBackend` if it can't be opened.

    If it can't be opened (LMDB rejects a directory on NFS, for example), `complain` is called with
    the reason. The same happens if the backend rejects a cap that the program did not pass as an
    argument.

    Raises:
        ConfigError: the backend rejects a cap that the program passed as an argument.
        UnknownBackendError: the backend is not installed.
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
    """Return the names of the backends that have a folder in a cache's directory.

    Raises:
        OSError: the directory can't be listed.
    """
    with os.scandir(directory.path) as items:
        return sorted(item.name for item in items if item.is_dir() and is_backend(item.name))


def warn_of_other_backend(opened: OpenedBackend) -> None:
    """Log a warning if the backend has no entries, but another backend has a folder beside it.

    Each process checks each directory only once.
    """
    directory = opened.directory
    if directory is None or opened.given or directory.path in _looked:
        return
    _looked.add(directory.path)
    sentence = other_backend_hint(directory, opened.config.backend, opened.backend)
    if sentence:
        log.warning_once(sentence)


def other_backend_hint(directory: CacheDirectory, named: Setting[str], backend: Backend) -> str:
    """Return a warning if `backend` has no entries, but another backend has a folder beside it.

    Otherwise, return an empty text.

    Args:
        directory: the cache's directory, which has the folders of both backends.
        named: the setting that names `backend`.
        backend: the backend that is in use.
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
        f"{' and '.join(others)}. To use the entries of {other}, set KCACHE_BACKEND={other} or run "
        f"kcache config --set backend={other}; to move them to {name}, run "
        f"kcache migrate --from {other} --to {name}"
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
    """Return an engine over the backend called `backend` in the cache's directory `directory`.

    Sizes are in bytes, or text such as `"512MB"`. With `memory_size=0`, every `get` reads the
    backend. The engine adds its counts to the directory's statistics. Settings in the environment
    and settings that are saved in the directory are ignored.

    Raises:
        ConfigError: a size is not allowed, or the directory is unsafe.
        UnknownBackendError: no backend called `backend` is installed.
        BackendError: the directory or the backend can't be opened.
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
    """Return an engine over an opened backend, which uses the files in the backend's directory.

    Args:
        opened: the backend; closed when the engine is closed.
        memory_size: the size of the memory tier in bytes.
        producer: the producer of the entries. If it is empty, the engine has no journal.
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
