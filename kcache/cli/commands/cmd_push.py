"""`kcache push`: sends kernels that the cache has to its remotes."""

from __future__ import annotations

from typing import Any

import click

from kcache.admin.filters import parse_filters
from kcache.admin.push import push as push_to_remotes
from kcache.cli.open_cache import open_existing
from kcache.cli.parameters import directory_option, filter_options, json_option
from kcache.cli.terminal import notify, progress, show
from kcache.util.units import counted


@click.command(short_help="Send the cache's kernels to its remotes.")
@filter_options
@json_option("array")
@directory_option
def push(*, as_json: bool, directory: str | None, **filters: Any) -> None:  # noqa: ANN401
    """Send kernels that the cache has to each remote of KCACHE_REMOTE that can be written to.

    A program sends only what it compiles. This command fills a new remote from a cache that exists.
    It does not count as a use of an entry. Exits with 1 if anything can't be stored.
    """
    with open_existing(directory) as cache, progress("pushing"):
        done = push_to_remotes(cache, parse_filters(**filters))
    if as_json:
        show([each._asdict() for each in done])
    for each in done:
        if not as_json:
            sent = f"{counted(each.kernels, 'kernel')} and {counted(each.manifests, 'manifest')}"
            show(f"{each.address}: {sent}")
        if each.failed:
            notify(f"error: {counted(each.failed)} not stored: {each.reason or each.address}")
        if each.left_out:
            notify(f"{counted(each.left_out)} left out: see kcache verify")
    if any(each.failed for each in done):
        raise click.exceptions.Exit(1)
