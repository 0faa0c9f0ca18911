"""Open cache: opens the cache that a command works on, by the option `--directory`."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from kcache.backend import NoBackend, open_backend
from kcache.cli.terminal import notify
from kcache.config import VARIABLES, Config, parse_saved, require_saved, variable
from kcache.directory import CacheDirectory, change_settings, open_directory
from kcache.engine.opening import (
    default_directory,
    elsewhere,
    find_cache,
    warn_if_elsewhere,
)
from kcache.errors import BackendError, ConfigError
from kcache.util import log

if TYPE_CHECKING:
    from kcache import KernelCache


def open_cache(directory: str | None, **settings: Any) -> KernelCache:  # noqa: ANN401
    """Return the cache in `directory`, or the one that the environment or the defaults name.

    This is for commands that compile: an error in the environment is a warning, as in any program.

    Args:
        directory: of the cache.
        settings: arguments of `KernelCache`.

    Raises:
        ConfigError: an option is not allowed, or the directory that one names is unsafe.
        UnknownBackendError: an option names a backend that is not installed.
    """
    from kcache import KernelCache  # `kcache doctor` also runs if it can't be imported

    return KernelCache(directory, **settings)


def open_existing(
    directory: str | None,
    *,
    backend: str | None = None,
    read_only: bool = True,
    changes: bool = False,
    quiet: bool = False,
) -> KernelCache:
    """Return the cache, but create no directory, not even the backend's folder.

    If it does not exist yet, a message is printed, and an empty cache without a directory is
    returned.

    An error in the environment is a warning, as in any program: an unsafe directory that it names
    is not used. For commands that change a cache (`changes`, also with `--dry-run`), it is an
    error, because they must not use another cache or cap than the user meant. With `quiet`, nothing
    is printed, and a cache that can't be used is not an error.

    Raises:
        BackendError: it exists and can't be used.
        ConfigError: it is not a cache or unsafe, or a setting is wrong.
        UnknownBackendError: no such backend is installed.
    """
    if changes:  # treated like an option, so it has to be safe
        directory = _required(directory, backend).directory.value
    cache = open_cache(directory, backend=backend, read_only=True)
    files, nothing = cache.opened.directory, cache.engine.backend
    if isinstance(nothing, NoBackend) and nothing.kind == "unusable" and not quiet:
        raise BackendError(nothing.reason)
    if files is None or not os.path.lexists(files.marker):
        cache.opened = cache.opened._replace(directory=None)
        if not quiet:
            notify("nothing has been cached yet")
        return cache
    if backend is None:
        warn_if_elsewhere(cache.opened)
    if read_only or not os.path.isdir(files.backend(cache.config.backend.value)):
        return cache
    cache.close()
    return open_cache(files.path, backend=backend)


def load_settings(
    directory: str | None,
    *,
    changes: bool = False,
    complain: Callable[[str], object] = log.warning_once,
) -> tuple[Config, Mapping[str, object]]:
    """Return the settings with those that are saved in the directory, and the texts of the latter.

    An error in the saved settings is a warning. So is an error in the environment, unless the
    command changes a cache.

    Raises:
        ConfigError: the option is not allowed; with `changes`, a variable.
        UnknownBackendError: as above.
    """
    if changes:
        _required(directory)
    try:
        config, files = find_cache({"directory": directory}, look=True, complain=complain)
    except ConfigError:  # the option does not name a cache: the command reports it when it uses it
        return Config.load({"directory": directory}, complain=lambda _: None), {}
    return config, {} if isinstance(files, NoBackend) else files.settings


def _required(directory: str | None, backend: str | None = None) -> Config:
    """Return the settings; an error in the environment is raised.

    Raises:
        ConfigError: an option or a variable is not allowed.
        UnknownBackendError: no such backend is installed.
    """
    config = Config.load({"directory": directory, "backend": backend})
    _, found = find_cache({"directory": directory}, look=True, complain=lambda _: None)
    if isinstance(found, NoBackend) and found.kind == "refused":
        raise ConfigError(f"{config.directory.source}: {found.reason}")
    return config


def named_directory(directory: str | None) -> str:
    """Return the directory that option, environment or default name, whether it exists or not.

    A variable's text that is not a path is returned unchanged.
    """
    named, source = Config.load({"directory": directory}, complain=lambda _: None).directory
    if named is None and source != "default":
        return variable(source) or ""
    return os.path.abspath(default_directory() if named is None else named)


def may_write(doing: str, directory: str | None = None) -> None:
    """Refuse to change a cache if a variable forbids writing to it.

    Raises:
        ConfigError: one does, or a variable has a wrong value.
        UnknownBackendError: it names a backend that is not installed.
    """
    config = _required(directory)
    for setting in (config.read_only, config.disable):
        if setting.value:
            raise ConfigError(f"{setting.source} is set: {doing} would write to the cache")


# -- saving --------------------------------------------------------------------------------------


def save(directory: str, given: Mapping[str, str], gone: Collection[str] = ()) -> list[str]:
    """Save settings, forget others, and return warnings about settings without effect.

    Args:
        directory: of the cache, created if it does not exist.
        given: name -> text.
        gone: names; of settings that another version has saved, too.

    Raises:
        ConfigError: a setting can't be saved, its value is not allowed, or not with that backend;
            or the directory is unsafe, or no cache.
        UnknownBackendError: no such backend is installed.
        BackendError: it can't be written, or the backend can't be used there.
    """
    files = open_directory(directory)
    for name, text in given.items():
        parse_saved(name, text)
    for name in gone:
        if name not in files.settings:
            require_saved(name)
    warnings: list[str] = []

    def change(settings: dict[str, object]) -> None:
        for name in gone:
            settings.pop(name, None)
        settings.update(given)
        config = Config.load(environ={}).with_saved(settings, files.marker, warnings.append)
        if given.keys() & {"backend", "max_size"}:
            warnings.append(_elsewhere(config, files))

    change_settings(files, change)
    here = Config.load(complain=lambda _: None)
    variables = {each.setting: each.name for each in VARIABLES}
    warnings += (
        f"{variables[name]} is set, and comes before the {name} that is saved"
        for name in given
        if getattr(here, name).source == variables[name]
    )
    return list(filter(None, warnings))


def _elsewhere(config: Config, files: CacheDirectory) -> str:
    """Open the backend as programs will, without changes; return a warning if the entries are
    elsewhere.

    Raises:
        ConfigError, BackendError: programs could not use it.
    """
    name, cap = config.backend.value, config.max_size.value
    opened = open_backend(name, files.backend(name), max_size=cap, read_only=True)
    with closing(opened) as backend:
        return elsewhere(files, config.backend, backend)
