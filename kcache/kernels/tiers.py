"""Tiers: opens the read-only tiers and the remotes that the setting `remote` names."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from kcache import environment
from kcache.backend import open_backend
from kcache.directory import CacheDirectory, require_safe_layer
from kcache.engine.opening import READ_SIZE, backends_in
from kcache.errors import BackendError, ConfigError, KcacheError
from kcache.kernels.lookup import SharedTier
from kcache.readonly.directory_tier import DirectoryTier, ReadOnlyTiers
from kcache.util import log
from kcache.util.child_process import without_dropin

if TYPE_CHECKING:
    from collections.abc import Callable

    from kcache.config import Config
    from kcache.kernels.lookup import LocalTier, Tiers
    from kcache.kernels.remotes import RemoteTier
    from kcache.readonly.directory_tier import ReadOnlyTier
    from kcache.remote.address import Address
    from kcache.remote.daemon_client import DaemonClient
    from kcache.remote.daemon_protocol import Setup


def open_read_only_tier(local: LocalTier, config: Config) -> SharedTier | None:
    """Return the read-only tiers that the settings name, opened; None if they name none.

    Raises:
        ConfigError: a layer that the program named is not safe, or not a cache.
    """
    layers = open_layers(config)
    if not layers:
        return None
    return SharedTier(local, ReadOnlyTiers(layers, partial(local.engine.report, "layer")), "layer")


def open_layers(
    config: Config, warn: Callable[[str], object] = log.warning_once
) -> list[ReadOnlyTier]:
    """Open the layers that the settings name, and return them in order; the caller closes them.

    A layer that can't be used is left out, with a warning.

    Raises:
        ConfigError: a layer that the program named is not safe, or not a cache.
    """
    addresses, source = config.remote
    key_file = config.signing_key_file.value
    layers: list[ReadOnlyTier] = []
    for address in addresses:
        if address.kind != "layer":
            continue
        try:
            layers.append(open_layer(address, key_file))
        except (KcacheError, OSError) as error:
            if isinstance(error, ConfigError) and source == "argument":
                raise
            warn(f"{error}. The cache works without this layer")
    return layers


def open_layer(address: Address, key_file: str | None) -> ReadOnlyTier:
    """Open the layer at an address; with a key file, a bundle has to be signed.

    Raises:
        ConfigError, BackendError, OSError: the layer can't be used.
    """
    path = address.path
    require_safe_layer(path)
    if os.path.isfile(path):
        from kcache.readonly.bundle_file import Bundle, is_bundle
        from kcache.remote.signing import make_sealer

        if not is_bundle(path):
            raise ConfigError(f"layer {path!r}: expected a bundle")
        return Bundle(path, keep=address.keep, sealer=make_sealer(key_file))
    named, files = address.option("backend"), CacheDirectory(path)
    found = [named] if named else backends_in(files)
    if not found:
        raise BackendError(f"layer {path} has no entries in it")
    # Usually there is one backend. If there are several, the tier has the entries of all of them.
    backends = [
        open_backend(name, files.backend(name), max_size=READ_SIZE, read_only=True)
        for name in found
    ]
    return DirectoryTier(path, backends, keep=address.keep)


def open_remote_tier(tiers: Tiers, config: Config) -> RemoteTier | None:
    """Return the remotes that the settings name, as a tier; None if they name none."""
    from kcache.kernels.remotes import RemoteTier  # a hit in a read-only tier does not need it

    client = open_remotes(config)
    return None if client is None else RemoteTier(tiers, client, wait=config.wait.value)


def open_remotes(
    config: Config, warn: Callable[[str], object] = log.warning_once
) -> DaemonClient | None:
    """Return a client of the daemon for the remotes that the settings name; None if none."""
    setup = _setup(config)
    if setup is None or config.disable.value:
        return None
    from kcache.daemons.spawn import path_of
    from kcache.remote.daemon_client import DaemonClient

    variables = without_dropin(environment.variables())
    variables.pop("KCACHE_REMOTE", None)  # the daemon gets the addresses through a pipe
    return DaemonClient(setup, lambda: path_of(setup.daemon(), variables), variables, warn=warn)


def report_remotes(
    config: Config, group: int, report: Callable[[str], object]
) -> DaemonClient | None:
    """Try the layers and remotes that the settings name; report those that can't be used.

    While the returned client is open, no remote is reported to the group again.

    Args:
        config: the settings.
        group: the process group to which each remote is reported once.
        report: called with a sentence for each problem.
    """
    for layer in open_layers(config, report):
        layer.close()
    client = open_remotes(config, report)
    if client is not None:
        client.group = group
        client.get(secrets.token_hex(32))
    return client


def remotes_socket(config: Config) -> str | None:
    """Return the path of the daemon's socket for the remotes of the settings; None if none.

    Raises:
        OSError: there is no folder for the socket.
    """
    from kcache.daemons.spawn import path_of

    setup = _setup(config)
    return None if setup is None else path_of(setup.daemon(), environment.variables())


def remote_status(config: Config) -> list[dict[str, Any]]:
    """Return the daemon's status of each remote that the settings name; start no daemon.

    The daemon ends a few seconds after its last program. Then the status is only the addresses.
    """
    from kcache.daemons.sockets import status

    running: dict[str, Any] = {}
    with suppress(OSError):
        path = remotes_socket(config)
        running = (path and status(path)) or {}
    found = {str(each["address"]): each for each in running.get("remotes", [])}
    shown = [address.redacted() for address in config.remote.value if address.kind != "layer"]
    return [found.get(address, {"address": address, "breaker": "unknown"}) for address in shown]


def _setup(config: Config) -> Setup | None:
    """Return the setup of the daemon for the remotes that the settings name; None if none."""
    addresses = tuple(each for each in config.remote.value if each.kind != "layer")
    if not addresses:
        return None
    from kcache.remote.daemon_protocol import Setup

    return Setup(addresses, _followed(config), environment.remote_variables())


def _followed(config: Config) -> dict[str, str]:
    """Return the settings that the daemon uses; another file of keys means another daemon."""
    path = config.signing_key_file.value
    if path is None:
        return {}
    try:
        status = os.stat(path)
    except OSError:  # the daemon logs the problem
        return {"signing_key_file": path}
    return {"signing_key_file": path, "version": f"{status.st_mtime_ns} {status.st_ino}"}
