"""Options: decorators that give commands their options, and the cache that `--directory` opens."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

import kcache
from kcache.backend import NoBackend
from kcache.cli.terminal import note_json, notify
from kcache.config import Config
from kcache.engine.opening import default_directory, find_cache, warn_of_other_backend
from kcache.environment import variable
from kcache.errors import BackendError, ConfigError
from kcache.util import log

if TYPE_CHECKING:
    from collections.abc import Mapping


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
    """Give a command the option `--json`: it prints one JSON `shape`; see `terminal.show`."""
    return click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=note_json,
        help=f"One JSON {shape}.",
    )


def options(*given: Callable[[F], F]) -> Callable[[F], F]:
    """Give a command several options, in this order."""

    def decorate(function: F) -> F:
        for option in reversed(given):
            function = option(function)
        return function

    return decorate


def cache_options(shape: str) -> Callable[[F], F]:
    """Give a command the options `--json`, see `json_option`, and `--directory`."""
    return options(json_option(shape), directory_option)


#: The options that select entries: the arguments of `selection`.
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


# -- the cache that a command works on -------------------------------------------------------------


def open_cache(directory: str | None, **settings: Any) -> kcache.KernelCache:  # noqa: ANN401
    """Return the cache in `directory`, or the one that the environment or the defaults name.

    This is for commands that compile: an error in the environment is a warning, as in any program.

    Args:
        directory: of the cache.
        settings: arguments of `KernelCache`.

    Raises:
        ConfigError: an option is not allowed, or names an unsafe directory.
        UnknownBackendError: an option names a backend that is not installed.
    """
    return kcache.KernelCache(directory, **settings)


def open_existing(
    directory: str | None,
    doing: str = "",
    *,
    writes: bool = True,
    backend: str | None = None,
    quiet: bool = False,
) -> kcache.KernelCache:
    """Return the cache, but create no directory, not even the backend's folder.

    If the cache does not exist yet, a message is printed, and an empty cache without a directory is
    returned.

    An error in the environment is a warning, as in any program: an unsafe directory that a variable
    names is not used. For commands that change a cache, the error is raised, because they must not
    use another cache or cap than the user meant.

    Args:
        directory: the directory that the option names.
        doing: the name of the command, if it changes a cache; empty if it only reads.
        writes: whether the command really changes the cache; False with `--dry-run`.
        backend: the backend to open instead of the one in use.
        quiet: print nothing, and return the cache even if it can't be used.

    Raises:
        BackendError: the cache exists and can't be used.
        ConfigError: the directory is not a cache or is unsafe, or a setting is wrong or forbids
            writing.
        UnknownBackendError: no such backend is installed.
    """
    if doing:  # treated like an option, so it has to be safe
        given = {"directory": directory, "backend": backend}
        directory = find_cache(given, look=True, complain=None)[0].directory.value
        if writes:
            may_write(doing, directory)
    cache = open_cache(directory, backend=backend, read_only=True)
    files, nothing = cache.opened.directory, cache.engine.backend
    if isinstance(nothing, NoBackend) and nothing.kind == "unusable" and not quiet:
        raise BackendError(nothing.reason)
    if files is None or not os.path.lexists(files.marker):
        cache.opened = cache.opened._replace(directory=None)
        if not quiet:
            notify("nothing has been cached yet")
        return cache
    if backend is None:
        warn_of_other_backend(cache.opened)
    if not (doing and writes and os.path.isdir(files.backend(cache.config.backend.value))):
        return cache
    cache.close()
    return open_cache(files.path, backend=backend)


def load_settings(
    directory: str | None, complain: Callable[[str], object] | None = log.warning_once
) -> tuple[Config, Mapping[str, object]]:
    """Return all settings, saved ones included, and the texts of the saved settings.

    An error in the environment or in the saved settings is a warning. With None for `complain`, as
    in a command that changes a cache, an error in the environment is raised.

    Raises:
        ConfigError: the option is not allowed, or, without `complain`, a variable.
        UnknownBackendError: without `complain`: a variable names a backend that is not installed.
    """
    given = {"directory": directory}
    try:
        config, files = find_cache(given, look=True, complain=complain)
    except ConfigError:  # not a cache: the command reports that when it opens it
        if complain is None:
            raise
        return Config.load(given, complain=lambda _: None), {}
    return config, {} if isinstance(files, NoBackend) else files.settings


def named_directory(directory: str | None) -> str:
    """Return the directory of the option, else of the environment, else the default one.

    The directory need not exist. A variable's text that is not a path is returned unchanged.
    """
    named, source = Config.load({"directory": directory}, complain=lambda _: None).directory
    if named is None and source != "default":
        return variable(source) or ""
    return os.path.abspath(default_directory() if named is None else named)


def may_write(doing: str, directory: str | None = None) -> Config:
    """Return the settings; refuse to change a cache if a setting forbids that.

    Raises:
        ConfigError: a setting forbids it, or a variable has a wrong value.
        UnknownBackendError: a variable names a backend that is not installed.
    """
    config, _ = load_settings(directory, complain=None)
    for setting in (config.read_only, config.disable):
        if setting.value:
            raise ConfigError(f"{setting.source} is set: {doing} would write to the cache")
    return config
