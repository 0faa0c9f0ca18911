"""`kcache report`: writes an HTML page about a cache."""

from __future__ import annotations

import click

from kcache.cli.open_cache import named_directory, open_existing
from kcache.cli.options import directory_option
from kcache.cli.terminal import OutputPath, progress, say, write_output
from kcache.errors import BackendError
from kcache.util.units import counted, format_size


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

    The page shows the saved compile time, hits and misses, the size and the cap, what fills the
    cache, when it was compiled, and what needs attention. It is one small file that loads nothing
    and runs no scripts. It names your kernels and the directory of the cache, so consider who may
    see that.
    """
    from kcache.cli.html_report.page import page
    from kcache.cli.html_report.snapshot import gather

    cache = open_existing(directory)
    if cache.directory is None:
        raise BackendError(f"there is no cache in {named_directory(directory)}")
    with cache, progress("Reading entries", cache.entry_count) as seen:
        snapshot = gather(cache, str(cache.directory), seen=seen)
    data = page(snapshot).encode()
    write_output(data, output)
    if output != "-":
        what = f"report of {counted(len(snapshot.items))}"
        say(f"{what} -> {output} ({format_size(len(data))})")
