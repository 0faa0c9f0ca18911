"""Wiring: builds the parts for a miss from the settings: compiler, remotes, resolver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kcache.kernels.resolver import Resolver

if TYPE_CHECKING:
    from collections.abc import Callable

    from kcache.config import Config
    from kcache.engine.opening import OpenedBackend
    from kcache.kernels.find import Finder
    from kcache.kernels.remotes import RemoteKernels
    from kcache.nvrtc.frontend import Frontend
    from kcache.nvrtc.request import Request

__all__ = ["build_resolver"]


def build_resolver(
    finder: Finder, opened: OpenedBackend, for_compiler: Callable[[Request, str], Request]
) -> Resolver:
    """Return the resolver of a cache.

    Args:
        finder: of the cache.
        opened: its directory, with its settings.
        for_compiler: see `Resolver`.
    """
    config = opened.config

    def build_frontend() -> Frontend:
        from kcache.nvrtc.compiler import Limits  # a waiting thread needs none
        from kcache.nvrtc.frontend import Frontend
        from kcache.nvrtc.workers.slots import Slots

        shared = None if finder.engine.read_only else opened.directory
        slots = None if shared is None else Slots(shared.slots, config.wait.value)
        limits = Limits(config.workers.value, config.compile_timeout.value, slots)
        return Frontend(finder.headers.digests, limits)

    return Resolver(
        finder,
        config,
        build_frontend,
        for_compiler,
        eager=_proves_eagerly(config),
        remotes=_remotes(finder, config) if config.remote.value else None,
    )


def _remotes(finder: Finder, config: Config) -> RemoteKernels | None:
    from kcache.kernels.tiers import build_remotes  # few programs use remotes

    return build_remotes(finder, config)


def _proves_eagerly(config: Config) -> bool:
    """Tell whether kernels are proven to be good elsewhere right after their first compile.

    By default they are if they are made for others, that is with a writable remote. The argument or
    the variable overrides that.
    """
    value, source = config.relocation
    for_others = any(each.writable for each in config.remote.value) and not config.read_only.value
    return value == "eager" or (source == "default" and for_others)
