"""The place of a cache: a directory that is safe to use, and the backend in it."""

from __future__ import annotations

from collections.abc import Iterator

from kcache.backend import Backend, UnavailableBackend
from kcache.config import Config, default_cache_directory, temporary_cache_directory
from kcache.directory import prepare
from kcache.errors import BackendError, ConfigError
from kcache.registry import open_backend
from kcache.util import log

__all__ = ["open_place", "prepared"]


def open_place(config: Config, *, read_only: bool) -> tuple[str | None, Backend]:
    """Return a directory that is safe to use, and the backend in it.

    A directory that the user named must be safe, or ConfigError says why not; where it can't be
    used for another reason, the cache does without. Of the defaults the first usable is taken.
    """
    named = config.directory.value
    reason = "no directory"
    for directory in _candidates(named):
        try:
            prepare(directory, read_only=read_only)
        except ConfigError as error:
            if named is not None:
                raise
            reason = str(error)
        except BackendError as error:
            reason = str(error)
        else:
            return directory, _open_backend(config, directory, read_only=read_only)
        log.info("not usable: %s", reason)
    return None, UnavailableBackend(reason)


def _candidates(named: str | None) -> Iterator[str]:
    if named is not None:
        yield named
    else:  # each only if it is needed: to find them takes a fresh process longer than a hit
        yield str(default_cache_directory())
        yield temporary_cache_directory()


def _open_backend(config: Config, directory: str, *, read_only: bool) -> Backend:
    """Return the backend, or, where it refuses the place (LMDB on NFS), one that says why."""
    name, max_size = config.backend.value, config.max_size.value
    try:
        return open_backend(name, directory, max_size=max_size, read_only=read_only)
    except BackendError as error:
        return UnavailableBackend(str(error))


def prepared(directory: str | None, read_only: bool) -> str | None:
    """Return a directory for the statistics, or None where there is none or it can't be used."""
    if directory is not None:
        try:
            prepare(directory, read_only=read_only)
        except BackendError as error:
            log.info("not usable: %s", error)
            return None
    return directory
