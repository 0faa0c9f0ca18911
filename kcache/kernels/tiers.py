"""Tiers: from the setting `remote` to layers below the cache, and to remotes behind it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kcache import config as settings
from kcache.registry import open_layers

if TYPE_CHECKING:
    from kcache.config import Config
    from kcache.kernels.find import Finder
    from kcache.kernels.remotes import RemoteKernels

__all__ = ["build_remotes", "with_layers"]


def with_layers(finder: Finder, config: Config, *, once: bool, writes: bool) -> Finder:
    """Return a finder that also looks into the layers that the settings name, if they name any.

    Raises:
        ConfigError: a layer that the program named is not safe, or no cache.
    """
    remote = config.remote
    layers = open_layers(
        remote.value,
        strict=remote.source == "argument",
        key_file=config.signing_key_file.value,
    )
    if not layers:
        return finder
    from kcache.kernels.layered import LayeredFinder

    return LayeredFinder(
        finder.engine, check_once=once, reads=finder.reads, writes=writes, layers=layers
    )


def build_remotes(finder: Finder, config: Config) -> RemoteKernels | None:
    """Return what asks the remotes that the settings name, or None if they name none."""
    addresses = tuple(each for each in config.remote.value if each.kind != "layer")
    if not addresses or config.disable.value:
        return None
    from kcache.kernels.remotes import RemoteKernels
    from kcache.remote import client
    from kcache.remote.agent_setup import Setup

    asked = client.client_for(
        Setup(addresses, _followed(config), settings.remote_variables()),
        settings.runtime_folders(),
        _environment(),
    )
    writes = not finder.engine.read_only
    return RemoteKernels(finder, asked, writes=writes, wait=config.wait.value)


def _environment() -> dict[str, str]:
    """Return the variables for the agent, which gets the addresses through a pipe."""
    variables = settings.without_dropin(settings.variables())
    variables.pop("KCACHE_REMOTE", None)
    return variables


def _followed(config: Config) -> dict[str, str]:
    """Return the settings that the agent follows; with another file of keys it is another agent."""
    path = config.signing_key_file.value
    if path is None:
        return {}
    try:
        status = os.stat(path)
    except OSError:  # the agent tells what is wrong with it
        return {"signing_key_file": path}
    return {"signing_key_file": path, "version": f"{status.st_mtime_ns} {status.st_ino}"}
