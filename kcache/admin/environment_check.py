"""Environment check: the warnings that a program gets when it opens a cache."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from kcache.config import Config
from kcache.directory import open_directory
from kcache.engine.opening import with_known_backend
from kcache.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["complaints", "refused_directory"]


def complaints(arguments: Mapping[str, object] | None = None) -> list[str]:
    """Return what is wrong with the environment, in the sentences that a program logs.

    Args:
        arguments: settings that replace variables.

    Raises:
        ConfigError: one of the arguments is not allowed.
    """
    found: list[str] = []
    config = Config.load(arguments, complain=found.append)
    with_known_backend(config, found.append)
    refused = refused_directory(config)
    if refused:
        found.append(f"{refused}. This process caches in memory alone")
    return found


def refused_directory(config: Config) -> str:
    """Return why a cache refuses the directory that a variable names, or empty; changes nothing."""
    named, source = config.directory
    if named is not None and source not in ("argument", "default"):
        try:
            with suppress(BackendError):  # it is not there yet, or can't be looked at
                open_directory(named, read_only=True)
        except ConfigError as error:
            return f"{source}: {error}"
    return ""
