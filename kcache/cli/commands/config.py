"""`kcache config`: every setting, its value and where that came from."""

from __future__ import annotations

import json

import click

from kcache._version import __version__
from kcache.cli.open_cache import (
    directory_option,
    json_option,
    named_directory,
)
from kcache.cli.terminal import columns, show
from kcache.config import VARIABLES, Config, Setting
from kcache.nvrtc import library
from kcache.util.distribution import how_to_install
from kcache.util.units import format_size

__all__ = ["config"]

_SIZES = ("max_size", "memory_size")


@click.command(short_help="Show every setting with its value and its source.")
@json_option("object")
@directory_option
def config(*, as_json: bool, directory: str | None) -> None:
    """Show every setting with its value and its source, and the compiler that kcache uses."""
    settings = _settings(directory)
    compiler = library.find()
    if as_json:
        found = None if compiler is None else compiler._asdict()
        about = {"version": __version__, "compiler": found, "settings": settings}
        show(json.dumps(about, indent=2))
        return
    rows = [("setting", "from", "value")]
    for name, setting in settings.items():
        rows.append((name, str(setting["source"]), _text(name, setting["value"])))
    facts = [("kcache", __version__)]
    if compiler is None:
        facts.append(("compiler", f"none: {how_to_install('cu13')} (CUDA 12: cu12)"))
    else:
        facts += [("compiler", compiler.path), ("identity", compiler.identity)]
    show(f"{columns(rows)}\n\n{columns(facts)}")


def _settings(directory: str | None) -> dict[str, dict[str, object]]:
    """Return every setting by name: its value, where that came from, and the variable for it."""
    loaded = Config.load({"directory": directory})
    found: dict[str, dict[str, object]] = {}
    for variable in VARIABLES:
        setting: Setting[object] = getattr(loaded, variable.setting)
        named = variable.setting == "directory"
        found[variable.setting] = {
            "value": named_directory(directory) if named else _shown(setting.value),
            "source": "--directory" if setting.source == "argument" else setting.source,
            "variable": variable.name,
        }
    return found


def _shown(value: object) -> object:
    """Return what JSON can say of a value; addresses are texts without credentials."""
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
