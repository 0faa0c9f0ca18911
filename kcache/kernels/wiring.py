"""Wiring: builds the parts for a miss from the settings: flight, compiler, remotes, resolver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kcache.engine.single_flight import Flight
from kcache.kernels.resolver import Answer, Factories, Resolver

if TYPE_CHECKING:
    from collections.abc import Callable

    from kcache.config import Config
    from kcache.engine.opening import OpenedBackend
    from kcache.kernels.find import Finder
    from kcache.kernels.remotes import RemoteKernels
    from kcache.nvrtc.files import FileDigests
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
        for_compiler: see `Factories`.
    """
    engine, config = finder.engine, opened.config
    #: The file through which processes exclude each other; None if they can't.
    shared = None if engine.read_only else opened.directory

    def build_flight() -> Flight[Answer]:
        path = None if shared is None else shared.flight
        return Flight(path, wait=config.wait.value, counters=engine.counters)

    def build_frontend(digests: FileDigests) -> Frontend:
        from kcache.nvrtc.compiler import Limits  # a waiting thread needs none
        from kcache.nvrtc.frontend import Frontend
        from kcache.nvrtc.workers.slots import Slots

        slots = None if shared is None else Slots(shared.slots, config.wait.value)
        limits = Limits(config.workers.value, config.compile_timeout.value, slots)
        return Frontend(digests, limits)

    return Resolver(
        finder,
        Factories(config, build_frontend, build_flight, for_compiler),
        writes=not config.disable.value,
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
