"""Options: decorators that add options to commands, and functions that open a command's cache."""

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
    """Return a decorator that adds an option without a value to a command."""
    return click.option(*names, is_flag=True, help=help)


def repeatable(*names: str, metavar: str, help: str, **more: Any) -> Callable[[F], F]:  # noqa: ANN401
    """Return a decorator that adds an option that a command line may repeat."""
    return click.option(
        *names, metavar=metavar, multiple=True, help=f"{help}  [repeatable]", **more
    )


def directory_option(function: F) -> F:
    """Add the option `--directory` to a command."""
    return click.option(
        "--directory",
        type=click.Path(),
        metavar="DIR",
        help="The cache's directory.  [default: $KCACHE_DIR, else the user's cache directory]",
    )(function)


def output_option(help: str, **more: Any) -> Callable[[F], F]:  # noqa: ANN401
    """Return a decorator that adds the option `--output`; `help` continues its help text."""
    return click.option(
        *("-o", "--output"),
        metavar="OUT",
        type=click.Path(),
        callback=_not_empty,
        help=f"The file to write, or - for standard output{help}",
        **more,
    )


def _not_empty(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
    """Return `path`, but reject an empty path, which is what an unset shell variable becomes."""
    if path == "":
        raise click.BadParameter("expected a file, or - for standard output, got ''")
    return path


def json_option(shape: str) -> Callable[[F], F]:
    """Return a decorator that adds `--json`, with which `terminal.show` prints one JSON `shape`."""
    return click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=note_json,
        help=f"Print the result as one JSON {shape}.",
    )


def options(*given: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds several options to a command, in this order."""

    def decorate(function: F) -> F:
        for option in reversed(given):
            function = option(function)
        return function

    return decorate


def cache_options(shape: str) -> Callable[[F], F]:
    """Return a decorator that adds the options `--json` (see `json_option`) and `--directory`."""
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
        help="Only kernels that have TEXT in their source name or in a name expression. If TEXT "
        "contains * or ?, it is a pattern that the whole name must match.",
    ),
    click.option(
        "--used-within",
        metavar="AGE",
        help="Only kernels that were last used at most AGE ago, such as 12h, 30d or 2w.",
    ),
    click.option(
        "--older-than",
        metavar="AGE",
        help="Only kernels that were last used more than AGE ago.",
    ),
)


# -- the cache that a command works on -------------------------------------------------------------


def open_cache(directory: str | None, **settings: Any) -> kcache.KernelCache:  # noqa: ANN401
    """Return the cache in `directory`, or else in the one that the environment or a default names.

    This is for commands that compile. An error in an environment variable only causes a warning, as
    in any other program.

    Args:
        directory: the value of the option `--directory`, or None.
        settings: further arguments of `KernelCache`.

    Raises:
        ConfigError: an argument is not allowed, or names an unsafe directory.
        UnknownBackendError: an argument names a backend that is not installed.
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
    """Return an existing cache. No directory is created, not even the folder of the backend.

    If the cache does not exist yet, print a message and return an empty cache, which has no
    directory.

    For a command that only reads, an error in an environment variable causes a warning, as in any
    other program: if a variable names an unsafe directory, that directory is not used. For a
    command that changes a cache, the error is raised, because the command must not change another
    cache, or apply another cap, than the user meant.

    Args:
        directory: the value of the option `--directory`, or None.
        doing: the name of the command if it changes a cache; empty if it only reads.
        writes: whether this run of the command changes the cache; False with `--dry-run`.
        backend: the backend to open instead of the one that the settings name.
        quiet: print no message; if the cache can't be used, return an empty cache.

    Raises:
        BackendError: the cache exists but can't be used.
        ConfigError: the directory is not a cache or is unsafe, or a setting is wrong or forbids
            writing.
        UnknownBackendError: the backend is not installed.
    """
    if doing:  # the directory is treated as if the option named it, so it has to be safe
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
    """Return all settings, including those saved with the cache, and the texts of the saved ones.

    `complain` is called with a warning for each error in the environment or in the saved settings.
    A command that changes a cache passes None: then an error in the environment is raised, and an
    error in the saved settings is ignored.

    Raises:
        ConfigError: `directory` is not a path; or `complain` is None, and a variable has a wrong
            value, or the directory is unsafe or not a cache.
        UnknownBackendError: `complain` is None, and a variable names a backend that is not
            installed.
    """
    given = {"directory": directory}
    try:
        config, files = find_cache(given, look=True, complain=complain)
    except ConfigError:  # unsafe or not a cache: the command reports that when it opens the cache
        if complain is None:
            raise
        return Config.load(given, complain=lambda _: None), {}
    return config, {} if isinstance(files, NoBackend) else files.settings


def named_directory(directory: str | None) -> str:
    """Return the directory that the option names, or else `KCACHE_DIR`, or else the default one.

    The directory need not exist. If the value of `KCACHE_DIR` is not a path, it is returned
    unchanged.
    """
    named, source = Config.load({"directory": directory}, complain=lambda _: None).directory
    if named is None and source != "default":
        return variable(source) or ""
    return os.path.abspath(default_directory() if named is None else named)


def may_write(doing: str, directory: str | None = None) -> Config:
    """Return the settings, or raise an error if one of them forbids changes to the cache.

    Args:
        doing: the name of the command, for the error.
        directory: the value of the option `--directory`, or None.

    Raises:
        ConfigError: the setting `read_only` or `disable` is on, or a variable has a wrong value.
        UnknownBackendError: a variable names a backend that is not installed.
    """
    config, _ = load_settings(directory, complain=None)
    for setting in (config.read_only, config.disable):
        if setting.value:
            raise ConfigError(f"{setting.source} is set, but {doing} would write to the cache")
    return config
