"""Saving: saves settings in the directory of a cache, and checks them with those there."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from kcache.config import VARIABLES, Config, Setting
from kcache.directory import CacheDirectory, prepare
from kcache.errors import BackendError, ConfigError
from kcache.other_backends import advice, sentence
from kcache.registry import holders, open_backend, require_backend
from kcache.saved_settings import SOURCE, change, read

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["save", "save_backend"]


def save(directory: str, given: Mapping[str, str], gone: Collection[str] = ()) -> list[str]:
    """Save settings, forget others, and return warnings about settings without effect.

    Args:
        directory: of the cache, created if it does not exist.
        given: name -> text.
        gone: names.

    Raises:
        ConfigError: a setting can't be saved, its value is not allowed, or not with that backend;
            or the directory is unsafe, or no cache.
        UnknownBackendError: no such backend is installed.
        BackendError: it can't be written, or the backend can't be used there.
    """
    prepare(directory)
    files = CacheDirectory(directory)
    before = read(files)
    both = {name: text for name, text in before.values.items() if name not in gone} | dict(given)
    empty = True
    if given.keys() & {"backend", "max_size"}:
        empty = _require_usable(both, files)
    change(files, given, gone)
    warnings = [each for each in before.problems if each in read(files).problems]
    warnings += _overridden(given)
    if "backend" in given and empty:
        name = str(both["backend"])
        found = holders(files, besides=name)
        if found:
            named = Setting(name, SOURCE)
            warnings.append(f"{sentence(named, found)}. {advice(named, found)}")
    return warnings


def _require_usable(settings: Mapping[str, object], files: CacheDirectory) -> bool:
    """Open the backend as programs will, without changes; tell whether it has no entries.

    Raises:
        ConfigError, UnknownBackendError, BackendError: programs could not use it.
    """
    shown = {name: settings[name] for name in ("backend", "max_size") if name in settings}
    config = Config.load(shown, environ={})
    name, cap = config.backend.value, config.max_size.value
    require_backend(name)
    with closing(open_backend(name, files.path, max_size=cap, read_only=True)) as backend:
        return backend.usage().entries == 0


def _overridden(given: Mapping[str, str]) -> list[str]:
    """Return the settings that an environment variable overrides here."""
    here = Config.load(complain=lambda _: None)
    variables = {each.setting: each.name for each in VARIABLES}
    return [
        f"{variables[name]} is set, and comes before the {name} that is saved"
        for name in given
        if getattr(here, name).source == variables[name]
    ]


def save_backend(directory: str, name: str) -> str:
    """Save the backend that has the entries now; return why that failed, or nothing."""
    try:
        change(CacheDirectory(directory), {"backend": name})
    except (ConfigError, BackendError) as error:
        return str(error)
    return ""
