"""Filters: the options `--name`, `--arch`, `--used-within` and `--older-than`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import click

from kcache.admin.filters import Filters, parse_filters
from kcache.cli.options import repeatable

__all__ = ["filter_options"]


def filter_options(function: Callable[..., object]) -> Callable[..., object]:
    """Give a command the options that select entries, as one parameter `filters`."""

    # The command's other options, passed on.
    @functools.wraps(function)
    def command(
        *,
        arch: tuple[str, ...],
        name: tuple[str, ...],
        used_within: str | None,
        older_than: str | None,
        **others: object,
    ) -> object:
        filters: Filters = parse_filters(name, arch, used_within, older_than)
        return function(filters=filters, **others)

    made: Callable[..., object] = command
    for option in reversed(_OPTIONS):
        made = option(made)
    return made


_OPTIONS = (
    repeatable("--arch", metavar="ARCH", help="Only kernels for this target, such as sm_90."),
    repeatable(
        "--name",
        metavar="TEXT",
        help="Only kernels whose source name or name expression has TEXT in it. With * or ?, TEXT "
        "is a pattern for all of the name.",
    ),
    click.option(
        "--used-within",
        metavar="AGE",
        help="Only kernels that were used in the last AGE, such as 12h, 30d or 2w.",
    ),
    click.option(
        "--older-than",
        metavar="AGE",
        help="Only kernels that nobody has used for AGE, likewise.",
    ),
)
