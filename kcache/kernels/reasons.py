"""Reasons: says why a request is compiled, in the log or in an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kcache.admin.explain import explain, set_aside
from kcache.errors import MissError
from kcache.nvrtc.inventory import title_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kcache.config import Config
    from kcache.kernels.find import Finder
    from kcache.nvrtc.request import Request

__all__ = ["reason", "refusal", "title"]


def refusal(finder: Finder, config: Config, request: Request) -> MissError:
    """Return the error for a request that the settings allow no compile for."""
    value, source = config.on_miss
    setting = "on_miss" if source == "argument" else source
    what = f"{title(request)} is not in the cache, and {setting}={value} allows no compile"
    why = reason(finder, config, request)
    return MissError(f"{what}: {why}", source_name=request.source_name)


def reason(finder: Finder, config: Config, request: Request) -> str:
    """Return why a request is compiled, as `kcache why` says it."""
    digests, aside = finder.headers.digests, set_aside(config)
    try:
        return explain(finder.engine, request, set_aside=aside, digests=digests).clauses
    except Exception as error:  # a reason that can't be found must not cost a kernel
        return f"the reason is unknown ({error!r})"


def title(request: Request, names: Sequence[str] = ()) -> str:
    """Return the source and its kernels; before the compile, those that request or source name."""
    return title_of(request.source_name, names or request.kernels())
