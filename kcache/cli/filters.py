"""Filters: the options that choose kernels, the same for each command that has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

from kcache.admin.bundle_contents import Filters
from kcache.util.units import parse_age

__all__ = ["filter_options", "filters_of"]

F = TypeVar("F", bound=Callable[..., object])


def filter_options(function: F) -> F:
    """Give a command `--name`, `--arch`, `--used-within` and `--older-than`."""
    for option in (
        click.option(
            "--older-than",
            metavar="AGE",
            help="Only kernels that nobody has used for AGE, such as 12h, 30d or 2w.",
        ),
        click.option(
            "--used-within", metavar="AGE", help="Only kernels that were used in the last AGE."
        ),
        click.option(
            "--arch", multiple=True, help="Only kernels for this target, such as sm_90. Repeatable."
        ),
        click.option(
            "--name",
            multiple=True,
            metavar="TEXT",
            help="Only kernels whose source name or name expression has TEXT in it. With * or ?, "
            "TEXT is a pattern for all of the name. Repeatable.",
        ),
    ):
        function = option(function)
    return function


def filters_of(
    name: tuple[str, ...],
    arch: tuple[str, ...],
    used_within: str | None,
    older_than: str | None,
) -> Filters:
    """Return what the options choose.

    Raises:
        ConfigError: an age is none.
    """
    return Filters(
        name,
        arch,
        None if used_within is None else parse_age(used_within, name="--used-within"),
        None if older_than is None else parse_age(older_than, name="--older-than"),
    )
