"""Parameters: the decorators that give commands their options; those that several share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., object])


def flag(*names: str, help: str) -> Callable[[F], F]:
    """Give a command an option without a value."""
    return click.option(*names, is_flag=True, help=help)


def repeatable(*names: str, metavar: str, help: str, **more: Any) -> Callable[[F], F]:  # noqa: ANN401
    """Give a command an option that may be given several times."""
    return click.option(
        *names, metavar=metavar, multiple=True, help=f"{help}  [repeatable]", **more
    )


def directory_option(function: F) -> F:
    """Give a command the option `--directory`."""
    return click.option(
        "--directory",
        type=click.Path(),
        metavar="DIR",
        help="The cache's directory.  [default: $KCACHE_DIR, else the user's cache directory]",
    )(function)


def output_option(help: str, **more: Any) -> Callable[[F], F]:  # noqa: ANN401
    """Give a command the option `--output`."""
    return click.option(
        *("-o", "--output"),
        metavar="OUT",
        type=click.Path(),
        callback=_not_empty,
        help=f"The file to write, - for standard output{help}",
        **more,
    )


def _not_empty(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
    """Refuse an empty path, as from an unset variable."""
    if path == "":
        raise click.BadParameter("expected a file, or - for standard output, got ''")
    return path


def json_option(shape: str) -> Callable[[F], F]:
    """Give a command the option `--json`, whose output is one `shape`."""
    return flag("--json", "as_json", help=f"One JSON {shape}.")


def options(*given: Callable[[F], F]) -> Callable[[F], F]:
    """Give a command several options, in this order."""

    def decorate(function: F) -> F:
        for option in reversed(given):
            function = option(function)
        return function

    return decorate


#: The options that select entries: the arguments of `parse_filters`.
filter_options = options(
    repeatable(
        "--arch", "archs", metavar="ARCH", help="Only kernels for this target, such as sm_90."
    ),
    repeatable(
        "--name",
        "names",
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
        help="Only kernels that were not used in the last AGE.",
    ),
)
