"""Commands that look: `kcache info`, `kcache stats` and `kcache config`."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING

import click

from kcache._version import __version__
from kcache.admin.info import format_info, stats_lines
from kcache.admin.prometheus import exposition
from kcache.backend import Usage
from kcache.cli.open_cache import (
    directory_option,
    json_option,
    may_write,
    named_directory,
    open_existing,
)
from kcache.cli.terminal import columns, say, show
from kcache.config import VARIABLES, Config, Setting
from kcache.engine.stats import StatsFile
from kcache.nvrtc import library
from kcache.util.units import format_size

if TYPE_CHECKING:
    from kcache import KernelCache

__all__ = ["config", "info", "stats"]

_SIZES = ("max_size", "memory_size")


@click.command(short_help="Show where the cache is, how full it is and what it has done.")
@directory_option
def info(*, directory: str | None) -> None:
    """Show where the cache is, how full it is, and what all processes have done with it."""
    cache = open_existing(directory)
    if cache is None:
        show(f"directory  {named_directory(directory)}\n(nothing has been cached yet)")
        return
    with cache:
        place = str(cache.directory)
        backend = cache.config.backend.value
        totals = _stats_file(place).total()
        text = format_info(cache.engine, directory=place, backend=backend, stats=totals)
    show(text)


@click.command(short_help="Show what all processes have done with the cache.")
@json_option("object")
@click.option(
    "--prometheus", is_flag=True, help="Prometheus' text format, for a textfile collector."
)
@click.option("--zero", is_flag=True, help="Start again from zero after showing the counts.")
@directory_option
def stats(*, as_json: bool, prometheus: bool, zero: bool, directory: str | None) -> None:
    """Show what all processes have done with the cache, since it was made or set to zero."""
    if as_json and prometheus:
        raise click.UsageError("--json and --prometheus exclude each other.")
    if zero:
        may_write("stats --zero")
    cache = open_existing(directory)
    with cache or nullcontext():
        place = named_directory(directory) if cache is None else str(cache.directory)
        totals = _stats_file(place).total()
        usage = _usage(cache)
        if as_json:
            figures = {"directory": place, "entries": usage.entries, "size_bytes": usage.bytes}
            show(json.dumps({**figures, **totals.to_dict()}, indent=2))
        elif prometheus:
            settings = Config.load({"directory": directory})
            about = {
                "version": __version__,
                "directory": place,
                "backend": settings.backend.value,
            }
            show(exposition(totals, usage, settings.max_size.value, about).removesuffix("\n"))
        else:
            show(columns(stats_lines(totals)))
    if zero:
        if cache is not None:
            _stats_file(place).zero()
        say("counting starts again from zero")


@click.command(short_help="Show every setting, its value and where that came from.")
@json_option("object")
@directory_option
def config(*, as_json: bool, directory: str | None) -> None:
    """Show every setting, its value and where that came from; then the compiler that is found."""
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
        facts.append(("compiler", "none: install kcache-cuda[cu13] or kcache-cuda[cu12]"))
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
            "value": named_directory(directory) if named else setting.value,
            "source": "--directory" if setting.source == "argument" else setting.source,
            "variable": variable.name,
        }
    return found


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name in _SIZES:
        return format_size(value)
    return "-" if value is None else str(value)


def _usage(cache: KernelCache | None) -> Usage:
    return Usage(0, 0) if cache is None else Usage(cache.size_bytes, cache.entry_count)


def _stats_file(directory: str) -> StatsFile:
    return StatsFile(os.path.join(directory, "stats"))
