"""`kcache config` shows and saves settings, `kcache path` prints the cache's directory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import click

from kcache._version import __version__
from kcache.cli.open_cache import load_settings, may_write, named_directory, save
from kcache.cli.parameters import directory_option, json_option, repeatable
from kcache.cli.terminal import columns, notify, show, write_stdout
from kcache.config import SAVED, VARIABLES, Setting
from kcache.nvrtc import library
from kcache.util.hints import how_to_install
from kcache.util.units import format_size, plain

_SIZES = ("max_size", "memory_size")


@click.command(short_help="Show every setting with its source, or save one.")
@repeatable(
    "--set",
    "given",
    metavar="NAME=VALUE",
    help="Save a setting with the cache, such as max_size=5GiB.",
)
@repeatable(
    "--unset", "gone", metavar="NAME", help="Forget a setting that is saved with the cache."
)
@json_option("object")
@directory_option
def config(
    *, given: tuple[str, ...], gone: tuple[str, ...], as_json: bool, directory: str | None
) -> None:
    """Show every setting with its value and its source, and the compiler that kcache uses.

    A setting that is saved with `--set` stays with the directory of the cache, in its file
    kcache.json. It holds for every program and command that uses the directory. Arguments and
    environment variables come before it. These can be saved: backend, max_size, memory_size,
    header_check, relocation, wait, workers, compile_timeout.
    """
    wanted = _pairs(given)
    both = sorted(wanted.keys() & set(gone))
    if both:
        raise click.UsageError(f"--set and --unset exclude each other: {', '.join(both)}.")
    if given or gone:
        may_write("config --set", directory)
        for warning in save(named_directory(directory), wanted, gone):
            notify(f"warning: {plain(warning)}")
    settings = _settings(directory)
    if as_json:
        found = library.find()
        compiler = None if found is None else found._asdict()
        about = {"version": __version__, "compiler": compiler, "settings": settings}
        show(about)
    elif given or gone:
        show(_rows({name: settings[name] for name in settings if name in (*wanted, *gone)}))
    else:
        show(f"{_rows(settings)}\n\n{columns(_facts())}")


@click.command(short_help="Print the directory of the cache.")
@directory_option
def path(*, directory: str | None) -> None:
    """Print the directory that programs and commands use as the cache, whether it exists or not."""
    load_settings(directory)  # this warns
    write_stdout(os.fsencode(named_directory(directory)) + b"\n")


def _pairs(given: Sequence[str]) -> dict[str, str]:
    """Return name -> value of the arguments of `--set`.

    Raises:
        click.UsageError: one has no `=`.
    """
    found: dict[str, str] = {}
    for pair in given:
        name, separator, value = pair.partition("=")
        if not separator:
            raise click.UsageError(f"--set {pair!r}: write NAME=VALUE, such as max_size=5GiB.")
        found[name.strip()] = value.strip()
    return found


def _facts() -> list[tuple[str, str]]:
    """Return the version and the compiler, for `kcache config`."""
    compiler = library.find()
    facts = [("kcache", __version__)]
    if compiler is None:
        return [*facts, ("compiler", f"none: {how_to_install('cu13')} (CUDA 12: cu12)")]
    return [*facts, ("compiler", compiler.path), ("identity", compiler.identity)]


def _settings(directory: str | None) -> dict[str, dict[str, object]]:
    """Return every setting by name: its value, its source, and the other ways to set it."""
    loaded, saved = load_settings(directory)
    found: dict[str, dict[str, object]] = {}
    for variable in VARIABLES:
        setting: Setting[object] = getattr(loaded, variable.setting)
        named = variable.setting == "directory"
        found[variable.setting] = {
            "value": named_directory(directory) if named else _shown(setting.value),
            "source": "--directory" if setting.source == "argument" else setting.source,
            "variable": variable.name,
        }
        if variable.setting in SAVED:
            found[variable.setting]["saved"] = saved.get(variable.setting)
    return found


def _rows(settings: Mapping[str, Mapping[str, object]]) -> str:
    """Return a table of settings."""
    rows = ((n, str(each["source"]), _text(n, each["value"])) for n, each in settings.items())
    return columns([("setting", "from", "value"), *rows])


def _shown(value: object) -> object:
    """Return a value for JSON; addresses become texts without credentials."""
    if isinstance(value, tuple):
        return [str(each) for each in value]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return value


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name in _SIZES:
        return format_size(value)
    if isinstance(value, list):
        return " ".join(value) or "-"  # pyright: ignore[reportUnknownArgumentType]
    return "-" if value is None else str(value)
