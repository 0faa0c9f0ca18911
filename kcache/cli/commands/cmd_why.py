"""`kcache why`: shows why the next compile of a source would miss, or that it would hit."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from kcache.cli.commands.cmd_compile import CompileArguments, asked_for, compile_options
from kcache.cli.listing import SHORT
from kcache.cli.open_cache import load_settings, named_directory, open_existing
from kcache.cli.parameters import directory_option, flag, json_option
from kcache.cli.terminal import columns, show
from kcache.config import Setting
from kcache.kernels.explain import Explanation, explain
from kcache.kernels.request_factory import Requests
from kcache.util.units import format_age, local_time

if TYPE_CHECKING:
    from kcache.kernels.explain import Near
    from kcache.kernels.request_diff import Cause

#: How many causes are shown with their old and new values. A new version of a library causes
#: hundreds.
_SHOWN = 20


@click.command(short_help="Show why a compile would miss the cache, or that it would hit.")
@compile_options
@flag("-q", "--quiet", help="Accepted as by `compile`.")
@json_option("object")
@directory_option
def why(*, quiet: bool, as_json: bool, directory: str | None, **given: Any) -> None:  # noqa: ANN401
    """Show why the next `kcache compile` with these arguments would miss, or that it would hit.

    Takes the arguments of `kcache compile`: replace `compile` by `why`. Compiles nothing, changes
    nothing, and is not counted.
    """
    del quiet
    asked = asked_for(**given)
    if len(asked) > 1:
        raise click.UsageError("This command takes one file and one architecture.")
    (one,) = asked
    settings, _ = load_settings(directory)
    if given["no_cache"]:
        settings = settings._replace(disable=Setting(True, "--no-cache"))
    if given["recache"]:
        settings = settings._replace(recache=Setting(True, "--recache"))
    # In the file's folder, like the compile.
    with (
        open_existing(directory, quiet=True) as cache,
        contextlib.chdir(one.source.folder or os.curdir),
    ):
        # Not through the cache: with KCACHE_RECORD set, the cache would record this request.
        request = Requests(0).make(
            one.source.text, one.names, one.options, source_name=one.source.name
        )
        explanation = explain(cache.engine, request, settings)
        path = cache.opened.path
    path = path or named_directory(directory)
    if as_json:
        show(_as_json(one, explanation, path, settings.backend.value))
        return
    rows = [("directory", f"{path} ({settings.backend.value})")]
    rows += [("kernel", explanation.kernel)] if explanation.kernel else []
    rows += [("manifest", explanation.manifest)] if explanation.manifest else []
    rows += _rows(explanation)
    if settings.read_only.value and not explanation.hit:
        rows.append(("note", f"{settings.read_only.source} is set: what is compiled is not kept"))
    show(f"{_sentence(one, explanation)}\n\n{columns(rows)}")


def _sentence(asked: CompileArguments, explanation: Explanation) -> str:
    source = asked.source
    what = f"{source.name if source.path == '-' else source.path} for {asked.options.target}"
    if explanation.hit:
        return f"{what} is in the cache: it would not be compiled."
    return f"{what} would be compiled: {explanation.clauses}."


def _rows(explanation: Explanation) -> Iterator[tuple[str, str]]:
    for cause in explanation.causes[:_SHOWN]:
        yield "cause", f"{cause.kind}: {cause.what}"
        if cause.before and cause.after and cause.before not in cause.what:
            yield "", f"  was {cause.before}"
            yield "", f"  is  {cause.after}"
    if len(explanation.causes) > _SHOWN:
        yield "", f"and {len(explanation.causes) - _SHOWN} more (--json has all)"
    if explanation.near is not None:
        yield "nearest", _near(explanation.near)


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
    asked: CompileArguments, explanation: Explanation, path: str, backend: str
) -> dict[str, object]:
    return {
        "cached": explanation.hit,
        "why": _sentence(asked, explanation),
        "causes": [_cause(cause) for cause in explanation.causes],
        "source": asked.source.path,
        "arch": asked.options.target,
        "key": explanation.key,
        "kernel": explanation.kernel or None,
        "manifest": explanation.manifest or None,
        "nearest": None if explanation.near is None else _near_json(explanation.near),
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
