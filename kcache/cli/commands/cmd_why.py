"""`kcache why`: shows why the next compile of a source would miss, or that it would hit."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import Any

import click

from kcache import environment
from kcache.cli.commands.cmd_compile import Job, compile_options, jobs_of
from kcache.cli.options import cache_options, flag, load_settings, named_directory, open_existing
from kcache.cli.terminal import SHORT, columns, show
from kcache.config import Setting
from kcache.dropin.run_environment import undo_locale
from kcache.errors import ConfigError
from kcache.kernels.explain import Explanation, Near, explain
from kcache.kernels.request_diff import Cause
from kcache.kernels.request_factory import Requests
from kcache.nvcc.request import Start
from kcache.nvrtc.request import Request
from kcache.util.units import format_age, local_time

#: How many causes are shown, each with its old and new value. A new version of a header library can
#: result in hundreds.
_SHOWN = 20
#: The key under which the command's context holds an nvcc command.
_COMMAND = "kcache.nvcc"


class _Why(click.Command):
    """A command that accepts an nvcc command after `--` instead of a file and options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Store an nvcc command in the context, because click must not parse its options."""
        at = args.index("--") if "--" in args else len(args)
        command = args[at + 1 :]
        if command and os.path.basename(command[0]) == "nvcc":
            ctx.meta[_COMMAND] = command
            args = [*args[:at], os.devnull]
        return super().parse_args(ctx, args)


@click.command(
    cls=_Why, short_help="Show why a compile would miss the cache, or that it would hit."
)
@compile_options
@flag("-q", "--quiet", help="No effect; accepted because `kcache compile` has this option.")
@cache_options("object")
def why(*, quiet: bool, directory: str | None, **given: Any) -> None:  # noqa: ANN401
    """Show why the next `kcache compile` with these arguments would miss, or that it would hit.

    The command takes the same arguments as `kcache compile`. For an nvcc command, run `kcache why
    -- nvcc -c kernel.cu -o kernel.o` in the same directory and with the same variables. The command
    compiles nothing, changes nothing, and does not count as a request.
    """
    del quiet
    command = click.get_current_context().meta.get(_COMMAND)
    request, source = _of_nvcc(command) if command else _of_kernel(jobs_of(**given))
    settings, _ = load_settings(directory)
    if given["no_cache"]:
        settings = settings._replace(disable=Setting(True, "--no-cache"))
    if given["recache"]:
        settings = settings._replace(recache=Setting(True, "--recache"))
    with open_existing(directory, quiet=True) as cache:
        found = explain(cache.engine, request, settings)
        path = cache.opened.path
    path, backend = path or named_directory(directory), settings.backend.value
    sentence = _sentence(request, source, found)
    rows = [("directory", f"{path} ({backend})")]
    rows += [("kernel", found.kernel)] if found.kernel else []
    rows += [("manifest", found.manifest)] if found.manifest else []
    rows += _rows(found)
    if settings.read_only.value and not found.hit:
        rows.append(("note", f"{settings.read_only.source} is set: the kernel is not stored"))
    record = {
        "cached": found.hit,
        "why": sentence,
        "causes": [_cause(cause) for cause in found.causes],
        "source": source,
        "arch": request.options.target,
        "key": found.key,
        "kernel": found.kernel or None,
        "manifest": found.manifest or None,
        "nearest": None if found.near is None else _near_json(found.near),
        "directory": path,
        "backend": backend,
    }
    show(lambda: f"{sentence}\n\n{columns(rows)}", record)


def _of_kernel(jobs: Sequence[Job]) -> tuple[Request, str]:
    """Return the request that `kcache compile` would make, and the source as the user named it.

    Raises:
        UsageError: there are several jobs.
    """
    if len(jobs) > 1:
        raise click.UsageError("This command takes one file and one architecture.")
    (job,) = jobs
    # The request is made in the file's folder, like that of the compile. It is not made through the
    # cache, which would record it if KCACHE_RECORD is set.
    with contextlib.chdir(job.folder or os.curdir):
        made = Requests(0).make(job.source, job.names, job.options, source_name=job.source_name)
    return made, job.path


def _of_nvcc(command: list[str]) -> tuple[Request, str]:
    """Return the request of an nvcc command, and the name of its source.

    Raises:
        ConfigError: the program does not exist.
    """
    program = shutil.which(command[0])
    if program is None:
        raise ConfigError(f"the program {command[0]} does not exist")
    undo_locale()
    mask = os.umask(0)
    os.umask(mask)
    start = Start.make(program, os.getcwd(), command, environment.variables(), mask=mask)
    return start.request, start.request.source_name


def _sentence(request: Request, source: str, found: Explanation) -> str:
    target, name = request.options.target, request.source_name if source == "-" else source
    what = f"{name} for {target}" if target else name
    if found.hit:
        return f"{what} is in the cache: it would not be compiled."
    return f"{what} would be compiled: {found.clauses}."


def _rows(explanation: Explanation) -> Iterator[tuple[str, str]]:
    for cause in explanation.causes[:_SHOWN]:
        yield "cause", f"{cause.kind}: {cause.what}"
        if cause.before and cause.after and cause.before not in cause.what:
            yield "", f"  was {cause.before}"
            yield "", f"  is  {cause.after}"
    if len(explanation.causes) > _SHOWN:
        yield "", f"and {len(explanation.causes) - _SHOWN} more (--json shows all)"
    if explanation.near is not None:
        yield "nearest", _near(explanation.near)


def _near(near: Near) -> str:
    """Return one line that describes the nearest entry."""
    about = near.about
    what = f"{near.key[:SHORT]}, {about.source_name} for {about.arch}"
    if about.created is None:
        return what
    moment = local_time(about.created)
    ago = format_age(time.time() - about.created)
    return f"{what}, compiled {moment:on %Y-%m-%d at %H:%M:%S} ({ago} ago)"


def _near_json(near: Near) -> dict[str, object]:
    names = ("created", "source_name", "names", "arch", "flags")
    return {"key": near.key, **{name: getattr(near.about, name) for name in names}}


def _cause(cause: Cause) -> dict[str, object]:
    """Return a cause for JSON; its unknown parts are null."""
    fields = cause._asdict()
    kind = fields.pop("kind")
    return {"cause": kind, **{name: value or None for name, value in fields.items()}}
