"""`kcache bundle`: copies kernels from one cache to another, in one file."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, BinaryIO

import click

from kcache.cli.filters import filter_options
from kcache.cli.groups import Group
from kcache.cli.keys import SHORT
from kcache.cli.open_cache import (
    directory_option,
    json_option,
    may_write,
    open_cache,
    open_existing,
    why_none,
)
from kcache.cli.terminal import counted, plain, say, show, spinner
from kcache.config import Config
from kcache.errors import BackendError
from kcache.util.units import format_size

if TYPE_CHECKING:
    from kcache.admin.bundles import BundleContents, Exported
    from kcache.admin.filters import Filters
    from kcache.nvrtc.inventory import Item

__all__ = ["bundle"]

#: How many problems are named one by one.
_NAMED = 5

_file = click.argument("file", type=click.Path(allow_dash=True), metavar="FILE")


@click.group(cls=Group, short_help="Write kernels into one file, or read them from one.")
def bundle() -> None:
    """Copy kernels from one cache to another, in one file.

    A bundle has kernels and their manifests. So a program on another machine, in another checkout
    or of another user finds the kernels, and compiles nothing.
    KCACHE_REMOTE=file:///path/kernels.kcb uses a bundle without unpacking it.

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
@click.option(
    "--reproducible",
    is_flag=True,
    help="Leave out when each kernel was compiled and how long that took, so that equal kernels of "
    "two builds make equal files.",
)
@json_option("object")
@directory_option
def export(
    *,
    output: str,
    filters: Filters,
    reproducible: bool,
    as_json: bool,
    directory: str | None,
) -> None:
    """Write kernels into a bundle.

    A kernel is exported if it matches each kind of option. Its manifest is exported with it. The
    same kernels make the same bytes on every machine. The command changes nothing in the cache, and
    does not count as a use of an entry.
    """
    from kcache.admin.bundles import export_bundle

    cache = open_existing(directory)
    if cache is None:
        raise BackendError(f"{why_none(directory)}, so there is nothing to export")
    target = _stdout() if output == "-" else output
    with cache, spinner("writing"):
        done = export_bundle(
            cache,
            target,
            **filters._asdict(),
            reproducible=reproducible,
        )
    _tell_export(done, output, as_json=as_json)


def _tell_export(done: Exported, output: str, *, as_json: bool) -> None:
    for item in done.left_out[:_NAMED]:
        say(f"left out: {item.kind} entry {item.key[:SHORT]}: {plain(item.problem)}")
    if len(done.left_out) > _NAMED:
        say(f"left out: {len(done.left_out) - _NAMED} more")
    kernels = counted(done.kernels, "kernel", "kernels")
    line = f"{kernels} and {counted(done.manifests, 'manifest', 'manifests')}"
    if as_json:
        left_out = [{"key": item.key, "problem": item.problem} for item in done.left_out]
        text = json.dumps({**done._asdict(), "left_out": left_out}, indent=2)
        click.echo(text, err=output == "-")
    elif output == "-":
        say(f"{line}, {format_size(done.size)}")
    else:
        show(f"{line} in {plain(output)}, {format_size(done.size)}")
    if not done.kernels:
        say("warning: no kernel fits, so the bundle is empty")


@bundle.command("import", short_help="Put a bundle's kernels into the cache.")
@_file
@json_option("object")
@directory_option
def import_(*, file: str, as_json: bool, directory: str | None) -> None:
    """Put the kernels of a bundle into the cache. FILE can be `-`, standard input.

    The command checks the whole bundle before it writes the first kernel, so a damaged bundle
    changes nothing. The cache keeps what it has. If the bundle is larger than the cap, only a part
    of it is imported.
    """
    from kcache.admin.bundle_import import import_bundle

    may_write("bundle import", directory)
    source = _stdin() if file == "-" else file
    config = Config.load({"directory": directory})
    with open_cache(config.directory.value) as cache, spinner("reading"):
        done = import_bundle(cache, source)
    if as_json:
        show(json.dumps(done._asdict(), indent=2))
    else:
        show(f"{counted(done.added)} added, {done.present} were there, {done.merged} merged")
    if done.other_version:
        say(f"warning: {counted(done.other_version)} of another version of kcache: left out")
    if done.no_room:
        say(
            f"warning: {counted(done.no_room)} left out: the cap is too small (KCACHE_MAX_SIZE, or "
            "kcache config --set max_size=SIZE)"
        )


@bundle.command("list", short_help="List the kernels in a bundle.")
@_file
@click.option("-a", "--all", "everything", is_flag=True, help="List manifests, too.")
@json_option("array")
def list_(*, file: str, everything: bool, as_json: bool) -> None:
    """List the kernels in a bundle, one line each. FILE can be `-`, standard input.

    Each entry is checked as it is listed.
    """
    from kcache.admin.bundles import list_bundle
    from kcache.nvrtc.inventory import MANIFEST

    source = _stdin() if file == "-" else file
    found = [item for item in list_bundle(source) if everything or item.kind != MANIFEST]
    if as_json:
        show(json.dumps([_item_json(item) for item in found], indent=2))
    elif found:
        show(_table(found))
    else:
        say("there are no kernels")


def _item_json(item: Item) -> dict[str, object]:
    from kcache.cli.listing import item_json

    return {name: value for name, value in item_json(item).items() if name != "last_use"}


def _table(found: list[Item]) -> str:
    from kcache.cli.listing import listing
    from kcache.nvrtc.inventory import unique_length

    digits = unique_length(item.key for item in found)
    return listing(found, digits, time.time(), used=False)


@bundle.command("verify", short_help="Read and check all of a bundle.")
@_file
@json_option("object")
def verify(*, file: str, as_json: bool) -> None:
    """Read and check all of a bundle. FILE can be `-`, standard input.

    Exits with 1 if it is damaged. Memory does not grow with its length.
    """
    from kcache.admin.bundles import verify_bundle

    source = _stdin() if file == "-" else file
    with spinner("reading"):
        found = verify_bundle(source)
    if as_json:
        show(json.dumps(found._asdict(), indent=2))
    else:
        show(_told(found))


def _told(found: BundleContents) -> str:
    kernels = counted(found.kernels, "kernel", "kernels")
    line = f"sound: {kernels} and {counted(found.manifests, 'manifest', 'manifests')}"
    if found.other_version:
        line += f", {counted(found.other_version)} of another version of kcache"
    return f"{line}, {format_size(found.size)}{', signed' if found.sealed else ', not signed'}"


def _stdin() -> BinaryIO:
    return sys.stdin.buffer


def _stdout() -> BinaryIO:
    if sys.stdout.isatty():
        raise click.UsageError("A bundle is no text. Send it to a file or to another program.")
    return sys.stdout.buffer
