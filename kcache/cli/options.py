"""Options: the decorators that give commands their options; those that several share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

__all__ = ["directory_option", "flag", "json_option", "repeatable"]

F = TypeVar("F", bound=Callable[..., object])


def flag(*names: str, help: str) -> Callable[[F], F]:
    """Give a command an option without a value."""
    return click.option(*names, is_flag=True, help=help)


def repeatable(*names: str, metavar: str, help: str, **more: Any) -> Callable[[F], F]:  # noqa: ANN401
    """Give a command an option that may be given several times."""
    told = f"{help}  [repeatable]"
    return click.option(*names, metavar=metavar, multiple=True, help=told, **more)


def directory_option(function: F) -> F:
    """Give a command the option `--directory`."""
    return click.option(
        "--directory",
        type=click.Path(),
        metavar="DIR",
        help="The cache's directory.  [default: $KCACHE_DIR, else the user's cache directory]",
    )(function)


def json_option(shape: str) -> Callable[[F], F]:
    """Give a command the option `--json`, whose output is one `shape`."""
    return flag("--json", "as_json", help=f"One JSON {shape}.")
