"""`kcache bundle`: copies kernels from one cache to another, in one file."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click

from kcache.admin.bundles import (
    Exported,
    Source,
    export_bundle,
    import_bundle,
    list_bundle,
    verify_bundle,
)
from kcache.cli.app import Group
from kcache.cli.entries import SHORT, item_json, listing
from kcache.cli.open_cache import may_write, open_cache, open_existing
from kcache.cli.options import directory_option, filter_options, flag, json_option
from kcache.cli.terminal import progress, say, show
from kcache.config import Config
from kcache.nvrtc.inventory import MANIFEST, unique_length
from kcache.util.units import counted, format_size, plain

#: How many problems are named one by one.
_NAMED = 5


def _source(_context: click.Context, _parameter: click.Parameter, value: str) -> Source:
    return sys.stdin.buffer if value == "-" else value


_file = click.argument("file", type=click.Path(allow_dash=True), metavar="FILE", callback=_source)


@click.group(cls=Group, short_help="Write kernels into one file, or read them from one.")
def bundle() -> None:
    """Copy kernels from one cache to another, in one file.

    A bundle has kernels and their manifests. So a program on another machine, in another checkout
    or of another user finds the kernels, and compiles nothing.
    KCACHE_REMOTE=file:///path/kernels.kcb uses a bundle without unpacking it. It is an SQLite
    database, into which everybody can look.

    A bundle contains code. Import a bundle only if you trust its author.
    """


@bundle.command("export", short_help="Write kernels into a bundle.")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    required=True,
    help="The bundle to write, - for standard output. Replaces a bundle, but no other file.",
)
@filter_options
@flag(
    "--reproducible",
    help="Leave out when each kernel was compiled and how long that took, so that equal kernels of "
    "two builds make equal files.",
)
@json_option("object")
@directory_option
def export(
    *,
    output: str,
    reproducible: bool,
    as_json: bool,
    directory: str | None,
    **filters: Any,  # noqa: ANN401
) -> None:
    """Write kernels into a bundle.

    A kernel is exported if it matches each kind of option. Its manifest is exported with it. The
    same kernels make the same bytes, with the same version of SQLite. The command changes nothing
    in the cache, and does not count as a use of an entry.
    """
    if output == "-" and sys.stdout.isatty():
        raise click.UsageError("A bundle is no text. Send it to a file or to another program.")
    target = sys.stdout.buffer if output == "-" else output
    with open_existing(directory) as cache, progress("writing"):
        done = export_bundle(cache, target, **filters, reproducible=reproducible)
    _tell_export(done, output, as_json=as_json)


def _tell_export(done: Exported, output: str, *, as_json: bool) -> None:
    for item in done.left_out[:_NAMED]:
        say(f"left out: {item.kind} entry {item.key[:SHORT]}: {plain(item.problem)}")
    if len(done.left_out) > _NAMED:
        say(f"left out: {len(done.left_out) - _NAMED} more")
    if as_json:
        left_out = [{"key": item.key, "problem": item.problem} for item in done.left_out]
        text = json.dumps({**done._asdict(), "left_out": left_out}, indent=2)
    else:
        text = f"{_amount(done.kernels, done.manifests)} in {output}, {format_size(done.size)}"
    click.echo(plain(text, "\n"), err=output == "-")
    if not done.kernels:
        say("warning: no kernel fits, so the bundle is empty")


def _amount(kernels: int, manifests: int) -> str:
    told = counted(kernels, "kernel")
    return f"{told} and {counted(manifests, 'manifest')}"


@bundle.command("import", short_help="Put a bundle's kernels into the cache.")
@_file
@json_option("object")
@directory_option
def import_(*, file: Source, as_json: bool, directory: str | None) -> None:
    """Put the kernels of a bundle into the cache. FILE can be `-`, standard input.

    The command checks the whole bundle before it writes the first kernel, so a damaged bundle
    changes nothing. The cache keeps what it has. If the bundle is larger than the cap, only a part
    of it is imported.
    """
    may_write("bundle import", directory)
    config = Config.load({"directory": directory})
    with open_cache(config.directory.value) as cache, progress("reading"):
        done = import_bundle(cache, file)
    told = f"{counted(done.added)} added, {done.present} were there, {done.merged} merged"
    show(done._asdict() if as_json else told)
    if done.other_version:
        say(f"warning: {counted(done.other_version)} of another version of kcache: left out")
    if done.no_room:
        say(f"warning: {counted(done.no_room)} left out: KCACHE_MAX_SIZE, the cap, is too small")


@bundle.command("list", short_help="List the kernels in a bundle.")
@_file
@flag("-a", "--all", "everything", help="List manifests, too.")
@json_option("array")
def list_(*, file: Source, everything: bool, as_json: bool) -> None:
    """List the kernels in a bundle, one line each. FILE can be `-`, standard input.

    Each entry is checked as it is listed.
    """
    found = [item for item in list_bundle(file) if everything or item.kind != MANIFEST]
    if as_json:
        rows = map(item_json, found)
        show([{name: row[name] for name in row if name != "last_use"} for row in rows])
    elif found:
        digits = unique_length(item.key for item in found)
        show(listing(found, digits, time.time(), used=False))
    else:
        say("there are no kernels")


@bundle.command("verify", short_help="Read and check all of a bundle.")
@_file
@json_option("object")
def verify(*, file: Source, as_json: bool) -> None:
    """Read and check every entry of a bundle. FILE can be `-`, standard input.

    Exits with 1 if it is damaged. Memory does not grow with its length.
    """
    with progress("reading"):
        found = verify_bundle(file)
    line = f"sound: {_amount(found.kernels, found.manifests)}"
    if found.other_version:
        line += f", {counted(found.other_version)} of another version of kcache"
    line += f", {format_size(found.size)}{', signed' if found.signed else ', not signed'}"
    show(found._asdict() if as_json else line)
