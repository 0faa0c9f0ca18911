"""Tiers: opens the read-only tiers that the setting `remote` names."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from kcache.backend import open_backend
from kcache.directory import CacheDirectory, require_safe_layer
from kcache.engine.opening import READ_SIZE, backends_in
from kcache.errors import BackendError, ConfigError, KcacheError
from kcache.readonly.directory_tier import DirectoryTier, ReadOnlyTiers
from kcache.util import log
from kcache.util.forks import importing

if TYPE_CHECKING:
    from collections.abc import Callable

    from kcache.config import Config
    from kcache.readonly.directory_tier import ReadOnlyTier
    from kcache.remote.address import Address


def open_read_only_tiers(
    config: Config, report: Callable[[str, BaseException], object]
) -> ReadOnlyTiers | None:
    """Open and return the read-only tiers that the settings name; None if they name none.

    `report` is called with `"layer"` and the exception if a tier can't be read later; see
    `CacheEngine.report`.

    Raises:
        ConfigError: the argument `remote` names a layer that is not safe or is not a cache.
    """
    layers = open_layers(config)
    return ReadOnlyTiers(layers, partial(report, "layer")) if layers else None


def open_layers(
    config: Config, warn: Callable[[str], object] = log.warning_once
) -> list[ReadOnlyTier]:
    """Open the layers that the settings name, and return them in order; the caller closes them.

    A layer that can't be used is left out, and `warn` is called with the reason.

    Raises:
        ConfigError: the argument `remote` names a layer that is not safe or is not a cache.
    """
    key_file = config.signing_key_file.value
    layers: list[ReadOnlyTier] = []
    for address in config.layers:
        try:
            layers.append(open_layer(address, key_file))
        except (KcacheError, OSError) as error:
            if isinstance(error, ConfigError) and config.remote.source == "argument":
                raise
            warn(f"{error}. kcache continues without this layer")
    return layers


def open_layer(address: Address, key_file: str | None) -> ReadOnlyTier:
    """Open and return the layer at `address`; with `key_file`, a bundle has to be signed.

    Raises:
        ConfigError, BackendError, OSError: the layer can't be used.
    """
    path = address.path
    require_safe_layer(path)
    if os.path.isfile(path):
        with importing:
            from kcache.readonly.bundle_file import Bundle, is_bundle  # noqa: PLC0415  8 ms
            from kcache.remote.signing import make_sealer  # noqa: PLC0415

        if not is_bundle(path):
            raise ConfigError(
                f"layer {path!r}: expected a bundle or a directory, got another kind of file"
            )
        return Bundle(path, keep=address.keep, sealer=make_sealer(key_file))
    named, files = address.option("backend"), CacheDirectory(path)
    found = [named] if named else backends_in(files)
    if not found:
        raise BackendError(f"layer {path!r}: expected a cache with entries, got an empty cache")
    # Usually the cache has one backend. If it has several, the tier has the entries of all of them.
    backends = [
        open_backend(name, files.backend(name), max_size=READ_SIZE, read_only=True)
        for name in found
    ]
    return DirectoryTier(path, backends, keep=address.keep)
