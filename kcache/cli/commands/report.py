"""`kcache report`: writes an HTML page about a cache."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile

import click

from kcache.cli.open_cache import directory_option, named_directory, open_existing, why_none
from kcache.cli.output import OutputPath, write_output
from kcache.cli.terminal import counted, naming, plain, progress, say
from kcache.errors import BackendError
from kcache.util.units import format_size

__all__ = ["report"]


@click.command(short_help="Write an HTML page about the cache.")
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    type=OutputPath(),
    default="kcache-report.html",
    show_default=True,
    help="The file to write, - for standard output.",
)
@directory_option
def report(*, output: str, directory: str | None) -> None:
    """Write one HTML page about the cache.

    The page shows the size and the cap, what fills the cache, hits and misses over time, the saved
    compile time, and what needs attention. It is one small file that loads nothing and runs no
    scripts. It names your kernels and the directory of the cache, so consider who may see that.
    """
    from kcache.cli.html_report.sections import page
    from kcache.cli.html_report.snapshot import gather

    cache = open_existing(directory)
    if cache is None:
        raise BackendError(
            f"there is no cache in {named_directory(directory)}: {why_none(directory)}"
        )
    with cache, progress("Reading entries", cache.entry_count) as seen:
        snapshot = gather(cache, str(cache.directory), seen=seen)
    data = page(snapshot).encode()
    if output == "-" or not _is_file(output):
        write_output(data, output)
    else:
        _replace(output, data)
    if output != "-":
        what = f"report of {counted(snapshot.entries)}"
        say(f"{what} -> {plain(output)} ({format_size(len(data))})")


def _is_file(output: str) -> bool:
    """Tell whether this is a regular file, or absent: a device or a pipe can't be replaced."""
    try:
        return stat.S_ISREG(os.stat(output).st_mode)
    except OSError:
        return not os.path.lexists(output)


def _replace(output: str, data: bytes) -> None:
    """Write a file so that a reader finds either the whole old file or the whole new one."""
    target = os.path.realpath(output)
    with naming(output):
        fd, temporary = tempfile.mkstemp(".tmp", ".kcache-report-", os.path.dirname(target))
        try:
            with open(fd, "wb") as file:
                file.write(data)
            os.chmod(temporary, _mode(target))
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def _mode(path: str) -> int:
    """Return the permissions of a file, or those that a new one gets."""
    try:
        return stat.S_IMODE(os.stat(path).st_mode)
    except FileNotFoundError:
        mask = os.umask(0o077)
        os.umask(mask)
        return 0o666 & ~mask
