"""Settings: saves them with a cache, and forgets them again."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from kcache.backend import open_backend
from kcache.config import VARIABLES, Config
from kcache.directory import CacheDirectory, change_settings, open_directory
from kcache.engine.opening import (
    elsewhere,
    parse_saved,
    require_saved,
    with_saved,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["save"]

_DEFAULTS = Config.load(environ={})


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
        config = with_saved(_DEFAULTS, CacheDirectory(files.path, settings), warnings.append)
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
    """Open the backend as programs will, without changes; tell whether the entries are elsewhere.

    Raises:
        ConfigError, BackendError: programs could not use it.
    """
    name, cap = config.backend.value, config.max_size.value
    opened = open_backend(name, files.backend(name), max_size=cap, read_only=True)
    with closing(opened) as backend:
        return elsewhere(files, config.backend, backend)
