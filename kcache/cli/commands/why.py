"""`kcache why`: says why the next compile of a source would miss, or that it would hit."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from kcache.admin.explain import Explanation, aside, explain, set_aside
from kcache.cli.compile_arguments import CompileArguments, NvccCommand, compile_options
from kcache.cli.entries import SHORT
from kcache.cli.open_cache import (
    NOTHING_YET,
    load_settings,
    named_directory,
    open_existing,
    why_none,
)
from kcache.cli.options import directory_option, flag, json_option
from kcache.cli.terminal import columns, show
from kcache.config import Config
from kcache.errors import BackendError
from kcache.kernels.request_factory import Requests
from kcache.util.units import format_age, local_time

if TYPE_CHECKING:
    from kcache import KernelCache
    from kcache.admin.explain import Near
    from kcache.admin.request_diff import Cause

__all__ = ["why"]

#: How many causes are shown with their old and new values. A new version of a library causes
#: hundreds.
_SHOWN = 20


@click.command(
    cls=NvccCommand, short_help="Say why a compile would miss the cache, or that it would hit."
)
@compile_options(output_help="As for kcache compile. Nothing is written.")
@flag("-q", "--quiet", help="Accepted as by `compile`.")
@json_option("object")
@directory_option
def why(*, asked: CompileArguments, quiet: bool, as_json: bool, directory: str | None) -> None:
    """Say why the next `kcache compile` with these arguments would miss, or that it would hit.

    Takes the arguments of `kcache compile`: replace `compile` by `why`. Compiles nothing, changes
    nothing, and is not counted.
    """
    del quiet
    settings, _ = load_settings(directory)
    unusable = ""
    cache: KernelCache | None = None
    try:
        cache = open_existing(directory)
    except BackendError as error:
        unusable = str(error)
    reason = why_none(directory)
    if cache is None and not unusable and reason != NOTHING_YET:
        unusable = reason
    with cache or contextlib.nullcontext():
        # In the file's folder, like the compile.
        with contextlib.chdir(asked.source.folder or os.curdir):
            # Not through the cache: with KCACHE_RECORD set, the cache would record this request.
            request = Requests(0).make(
                asked.source.text, asked.names, asked.options, source_name=asked.source.name
            )
            told = explain(
                None if cache is None else cache.engine,
                request,
                set_aside=_set_aside(asked, settings),
                unusable=unusable,
            )
        path = named_directory(directory) if cache is None else str(cache.directory)
    if as_json:
        show(_as_json(asked, told, path, settings.backend.value))
        return
    rows = [("directory", f"{path} ({settings.backend.value})")]
    rows += [("kernel", told.kernel)] if told.kernel else []
    rows += [("manifest", told.manifest)] if told.manifest else []
    rows += _rows(told)
    if settings.read_only.value and not told.hit:
        rows.append(("note", f"{settings.read_only.source} is set: what is compiled is not kept"))
    show(f"{_sentence(asked, told)}\n\n{columns(rows)}")


def _set_aside(asked: CompileArguments, settings: Config) -> Iterator[tuple[str, str]]:
    """Yield the options, or else the settings, that bypass the cache, with a clause for each."""
    given = [aside("disable", "--no-cache")] * asked.no_cache
    given += [aside("recache", "--recache")] * asked.recache
    yield from {**dict(set_aside(settings)), **dict(given)}.items()


def _sentence(asked: CompileArguments, told: Explanation) -> str:
    source = asked.source
    what = f"{source.name if source.path == '-' else source.path} for {asked.options.target}"
    if told.hit:
        return f"{what} is in the cache: it would not be compiled."
    return f"{what} would be compiled: {told.clauses}."


def _rows(told: Explanation) -> Iterator[tuple[str, str]]:
    for cause in told.causes[:_SHOWN]:
        yield "cause", f"{cause.kind}: {cause.what}"
        if cause.before and cause.after and cause.before not in cause.what:
            yield "", f"  was {cause.before}"
            yield "", f"  is  {cause.after}"
    if len(told.causes) > _SHOWN:
        yield "", f"and {len(told.causes) - _SHOWN} more (--json has all)"
    if told.near is not None:
        yield "nearest", _near(told.near)


def _near(near: Near) -> str:
    """Return one line about the nearest entry."""
    about = near.about
    what = f"{near.key[:SHORT]}, {about.source_name} for {about.arch}"
    if about.created is None:
        return what
    moment = local_time(about.created)
    ago = format_age(time.time() - about.created)
    return f"{what}, compiled {moment:on %Y-%m-%d at %H:%M:%S} ({ago} ago)"


def _as_json(
    asked: CompileArguments, told: Explanation, path: str, backend: str
) -> dict[str, object]:
    return {
        "cached": told.hit,
        "why": _sentence(asked, told),
        "causes": [_cause(cause) for cause in told.causes],
        "source": asked.source.path,
        "arch": asked.options.target,
        "key": told.key,
        "kernel": told.kernel or None,
        "manifest": told.manifest or None,
        "nearest": None if told.near is None else _near_json(told.near),
        "directory": path,
        "backend": backend,
    }


def _near_json(near: Near) -> dict[str, object]:
    names = ("created", "source_name", "names", "arch", "flags")
    return {"key": near.key, **{name: getattr(near.about, name) for name in names}}


def _cause(cause: Cause) -> dict[str, object]:
    """Return a cause; its unknown parts are null."""
    fields = cause._asdict()
    kind = fields.pop("kind")
    return {"cause": kind, **{name: value or None for name, value in fields.items()}}
