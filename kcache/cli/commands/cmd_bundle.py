"""`kcache bundle` copies kernels from one cache to another, in one file.

`kcache push` sends kernels to remotes, and `kcache key` makes the keys that sign kernels.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from kcache.admin.bundles import (
    BundleContents,
    Exported,
    Source,
    export_bundle,
    import_bundle,
    list_bundle,
    problems,
    verify_bundle,
)
from kcache.admin.oci_layout import bundle_at, export_layout
from kcache.admin.transfer import Pushed, selection
from kcache.admin.transfer import push as push_to_remotes
from kcache.cli.commands.cmd_ls import item_json, listing
from kcache.cli.commands.cmd_warm import cached_ones, listed, read_wanted
from kcache.cli.options import (
    cache_options,
    filter_options,
    flag,
    json_option,
    may_write,
    open_cache,
    open_existing,
    repeatable,
)
from kcache.cli.terminal import (
    SHORT,
    STDIN,
    STDOUT,
    binary,
    notify,
    progress,
    refuse_terminal,
    show,
    wants_json,
    write_stdout,
)
from kcache.errors import ConfigError
from kcache.nvrtc.entries import MANIFEST, unique_length
from kcache.remote.signing import id_of, make_keys, public_part, read_keys, write_keys
from kcache.util.units import counted, format_size, plain

#: How many of the entries that are left out have a message of their own.
_NAMED = 5
#: What `verify` prints for each value of `BundleContents.signed`.
_SIGNED = {
    True: "signed",
    False: "not signed",
    None: "with signatures that were not verified: KCACHE_SIGNING_KEY_FILE is not set",
}


def _source(_context: click.Context, _parameter: click.Parameter, value: str) -> Source:
    return binary(sys.stdin, STDIN) if value == "-" else value


_file = click.argument("file", type=click.Path(allow_dash=True), metavar="FILE", callback=_source)


@click.group(short_help="Write kernels into one file, or read such a file.")
def bundle() -> None:
    """Copy kernels from one cache to another, in one file.

    A bundle contains kernels and their manifests. With it, a program on another machine, in another
    checkout or of another user finds these kernels instead of compiling them. To use a bundle
    without importing it, set KCACHE_REMOTE=file:///path/kernels.kcb. A bundle is an SQLite
    database, so any SQLite tool can open it.

    A bundle contains code that will run on your GPU. Use a bundle only if you trust its author.
    """


@bundle.command("export", short_help="Write kernels into a bundle.")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="The bundle to write, or - for standard output. An existing bundle or an empty file is "
    "replaced; any other existing file is an error.",
)
@click.option(
    "--oci",
    type=click.Path(),
    metavar="DIR",
    help="Write an OCI image layout that contains the bundle into DIR instead. DIR must be new or "
    "empty.",
)
@filter_options
@flag(
    "--reproducible",
    help="Leave out when each kernel was compiled and how long the compile took, so that two "
    "builds with equal kernels write identical files.",
)
@cache_options("object")
def export(*, output: str | None, oci: str | None, directory: str | None, **chosen: Any) -> None:  # noqa: ANN401
    """Write kernels into a bundle.

    If filter options are given, a kernel is exported only if it matches all of them. Of the values
    of a repeated option, it must match one. A kernel's manifests are exported with it. The same
    entries always make the same bytes, if the version of SQLite is the same. The command does not
    change the cache, and does not count as a use of an entry.

    With --oci, DIR is an image whose labels describe the kernels. skopeo, oras and crane can push
    it to a registry, and Kubernetes can mount it.
    """
    target = output or oci
    if target is None or (output and oci):
        raise click.UsageError("Expected either --output or --oci.")
    if output == "-":
        refuse_terminal("bundle")
    with open_existing(directory) as cache, progress("writing"):
        if output is None:
            done = export_layout(cache, target, **chosen)
        else:
            file = binary(sys.stdout, STDOUT) if output == "-" else output
            done = export_bundle(cache, file, **chosen)
    for item in done.left_out[:_NAMED]:
        notify(f"left out: {item.kind} entry {item.key[:SHORT]}: {plain(item.problem)}")
    if len(done.left_out) > _NAMED:
        notify(f"left out: {counted(len(done.left_out) - _NAMED, 'further entry')}")
    left_out = [{"key": item.key, "problem": item.problem} for item in done.left_out]
    text = f"{_amount(done)} in {target}, {format_size(done.size)}"
    show(text, {**done._asdict(), "left_out": left_out}, err=output == "-")
    if not done.kernels:
        notify("warning: no kernel matches, so the bundle is empty")


def _amount(done: Exported | BundleContents | Pushed) -> str:
    return f"{counted(done.kernels, 'kernel')} and {counted(done.manifests, 'manifest')}"


@bundle.command("import", short_help="Put a bundle's kernels into the cache.")
@_file
@cache_options("object")
def import_(*, file: Source, directory: str | None) -> None:
    """Put the kernels of a bundle into the cache. FILE can be `-` for standard input.

    The command checks the whole bundle before it writes the first kernel, so a damaged bundle
    changes nothing. An entry that the cache already has is not replaced. If the bundle is larger
    than the cap, only a part of it is imported.
    """
    config = may_write("bundle import", directory)
    with open_cache(config.directory.value) as cache, progress("reading"):
        done = import_bundle(cache, file)
    sentence = f"{counted(done.added)} added, {done.present} already present, {done.merged} merged"
    show(sentence, done._asdict())
    if done.other_version:
        notify(f"warning: left out {counted(done.other_version)} of another version of kcache")
    if done.no_room:
        notify(f"warning: left out {counted(done.no_room)}: the cap (KCACHE_MAX_SIZE) is too small")


@bundle.command("list", short_help="List the kernels in a bundle.")
@_file
@flag("-a", "--all", "everything", help="List manifests, too.")
@json_option("array")
def list_(*, file: Source, everything: bool) -> None:
    """List the kernels in a bundle, one line each. FILE can be `-` for standard input.

    The command checks every entry first. If one is damaged, it exits with 1 and lists none.
    """
    found = [item for item in list_bundle(file) if everything or item.kind != MANIFEST]
    digits = unique_length(item.key for item in found)
    rows = [{n: value for n, value in item_json(each).items() if n != "last_use"} for each in found]
    show(lambda: listing(found, digits, time.time(), used=False), rows)
    if not (found or wants_json()):
        notify("the bundle contains no kernels")


@bundle.command("verify", short_help="Read and check all of a bundle.")
@_file
@json_option("object")
def verify(*, file: Source) -> None:
    """Read and check every entry of a bundle. FILE can be `-` for standard input.

    The command exits with 1 if the bundle is damaged. Its memory use does not depend on the size of
    the bundle.
    """
    with progress("reading"):
        found = verify_bundle(file)
    line = f"sound: {_amount(found)}"
    if found.other_version:
        line += f", {counted(found.other_version)} of another version of kcache"
    line += f", {format_size(found.size)}, {_SIGNED[found.signed]}"
    show(line, found._asdict())


@bundle.command("check", short_help="Check whether programs here would use a bundle.")
@click.argument("file", type=click.Path(exists=True), metavar="FILE")
@repeatable(
    *("--arch", "archs"),
    metavar="ARCH",
    help="A target that the bundle must have kernels for.  [default: the GPU's]",
)
@click.option(
    "--list",
    "list_file",
    type=click.Path(exists=True, dir_okay=False),
    metavar="LIST",
    help="A list of kernels, as for kcache warm. The bundle must contain all of them.",
)
@json_option("object")
def check(*, file: str, archs: tuple[str, ...], list_file: str | None) -> None:
    """Check whether programs on this machine would use a bundle. If not, print why and exit with 1.

    FILE is a bundle, a directory that contains kernels.kcb, or an OCI image layout. The bundle must
    contain kernels for each target, compiled by the build of NVRTC that is installed here. If a
    CUDA driver is installed, it must be able to load these kernels. Other users must not be able to
    write to the bundle; this is not checked for an OCI image layout.
    """
    with bundle_at(file) as path, progress("reading"):
        contents = verify_bundle(path)
        found = list(problems(path, contents, archs))
        if list_file is not None:
            found += _missing(path, list_file, archs)
    serves = f"serves: {_amount(contents)}, {', '.join(contents.archs)}"
    show("" if found else serves, {"problems": found, **contents._asdict()})
    for problem in found:
        notify(f"{file}: {plain(problem)}")
    raise click.exceptions.Exit(int(bool(found)))


def _missing(path: str, list_file: str, archs: tuple[str, ...]) -> list[str]:
    """Return one sentence for each kernel of the list that the bundle does not contain."""
    remote = Path(path).absolute().as_uri()
    with ExitStack() as stack:
        kernels, starts = read_wanted(list_file, archs, stack)
        wanted = [*kernels, *map(listed, starts)]
        empty = stack.enter_context(tempfile.TemporaryDirectory(prefix="kcache-"))
        cache = open_cache(os.path.join(empty, "cache"), remote=remote, on_miss="compile")
        cached = cached_ones(kernels, starts, stack.enter_context(cache))
    pairs = zip(wanted, cached, strict=True)
    return [f"list: {each.title} ({each.arch}) is missing" for each, there in pairs if not there]


# -- push ------------------------------------------------------------------------------------------


@click.command(short_help="Send the cache's kernels to its remotes.")
@filter_options
@cache_options("array")
def push(*, directory: str | None, **filters: Any) -> None:  # noqa: ANN401
    """Send the cache's kernels to every remote that KCACHE_REMOTE names and that can be written to.

    A program sends only the kernels that it compiles itself. Use this command to fill a new remote
    from an existing cache. Sending an entry does not count as a use of it. The command exits with 1
    if an entry could not be stored.
    """
    with open_existing(directory) as cache, progress("pushing"):
        done = push_to_remotes(cache, selection(**filters))
    lines = [f"{each.address}: {_amount(each)}" for each in done]
    show("\n".join(lines), [each._asdict() for each in done])
    for each in done:
        if each.failed:
            notify(f"error: {counted(each.failed)} not stored: {each.reason or each.address}")
        if each.left_out:
            notify(f"left out {counted(each.left_out)}: kcache verify shows the reasons")
    raise click.exceptions.Exit(int(any(each.failed for each in done)))


# -- key -------------------------------------------------------------------------------------------


@click.group(short_help="Make keys that sign kernels for other machines.")
def key() -> None:
    """Make and show the keys that sign kernels for other machines.

    Set KCACHE_SIGNING_KEY_FILE to the path of the file with the keys. kcache then uses a kernel
    from another machine only if one of these keys has signed it.
    """


@key.command()
@click.argument("file", type=click.Path(dir_okay=False))
def new(*, file: str) -> None:
    """Write a new key to FILE, which only you can read, and its public half to FILE.pub.

    The key is an Ed25519 key in OpenSSL's format. Give FILE.pub to the machines that only read
    kernels. If FILE or FILE.pub already exists, the command exits with 2 and writes nothing.
    """
    private, public = make_keys()
    taken = [name for name in (file, f"{file}.pub") if os.path.lexists(name)]
    if taken:
        raise ConfigError(f"{taken[0]} already exists, and a key is never replaced")
    write_keys(file, private)
    show(f"wrote {file}: this key signs and verifies; keep it secret")
    write_keys(f"{file}.pub", public, mode=0o644)
    show(f"wrote {file}.pub: this key only verifies; give it to machines that only read kernels")


@key.command("show")
@click.argument("file", type=click.Path(dir_okay=False))
@flag("--public", help="Print only the public halves of the keys, as PEM.")
@json_option("array")
def show_key(*, file: str, public: bool) -> None:
    """Show the id of each key in FILE, and whether the key can sign. No secret is printed."""
    if public and wants_json():
        raise click.UsageError("--public and --json can't be combined.")
    keys = read_keys(file)
    if public:
        write_stdout(public_part(keys))
        return
    signer = None if keys.signer is None else id_of(keys.signer.public_key())
    found = [{"id": each.hex(), "signs": each == signer} for each in keys.verifiers]
    lines = (
        f"{each['id']}  {'signs and verifies' if each['signs'] else 'verifies'}" for each in found
    )
    show("\n".join(lines), found)
