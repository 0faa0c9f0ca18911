"""`kcache config` shows and saves settings, and `kcache path` prints the cache's directory.

`kcache migrate` moves every entry to another backend in the same directory.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import closing, suppress

import click

from kcache._version import __version__
from kcache.admin.transfer import TOO_LARGE, Moved, move_entries, remove_emptied
from kcache.backend import open_backend, require_backend
from kcache.cli.options import (
    directory_option,
    flag,
    json_option,
    load_settings,
    may_write,
    named_directory,
    open_cache,
    open_existing,
    repeatable,
)
from kcache.cli.terminal import columns, notify, progress, show, write_stdout
from kcache.config import SAVED, VARIABLES, Config, Setting, parse_saved, require_saved
from kcache.directory import CacheDirectory, change_settings, open_directory
from kcache.engine.opening import backends_in, other_backend_hint
from kcache.errors import KcacheError
from kcache.nvrtc import library
from kcache.nvrtc.entries import DAMAGED, OTHER, UNREADABLE
from kcache.util.units import counted, format_size, plain


@click.command(short_help="Show every setting with its source, or save settings.")
@repeatable(
    "--set",
    "given",
    metavar="NAME=VALUE",
    help="Save a setting with the cache, such as max_size=5GiB.",
)
@repeatable(
    "--unset", "gone", metavar="NAME", help="Remove a setting that is saved with the cache."
)
@json_option("object")
@directory_option
def config(*, given: tuple[str, ...], gone: tuple[str, ...], directory: str | None) -> None:
    """Show every setting with its value and its source, and the compiler that kcache uses.

    `--set` saves a setting in the file kcache.json in the directory of the cache. The setting
    applies to every program and command that uses this directory. Arguments and environment
    variables take precedence over it. These settings can be saved: backend, max_size, memory_size,
    header_check, relocation, wait, workers, compile_timeout.
    """
    wanted: dict[str, str] = {}
    for pair in given:
        name, separator, value = pair.partition("=")
        if not separator:
            expected = "expected NAME=VALUE, such as max_size=5GiB"
            raise click.UsageError(f"--set: {expected}, got {pair!r}.")
        wanted[name.strip()] = value.strip()
    both = sorted(wanted.keys() & set(gone))
    if both:
        raise click.UsageError(f"--set and --unset name the same setting: {', '.join(both)}.")
    if given or gone:
        may_write("config --set", directory)
        for warning in save(named_directory(directory), wanted, gone):
            notify(f"warning: {plain(warning)}")
    settings, compiler = _settings(directory), library.find()
    facts = [("kcache", __version__)]
    if compiler is None:
        facts.append(("compiler", f"not found: {library.HOW_TO_INSTALL}"))
    else:
        facts += [("compiler", compiler.path), ("identity", compiler.identity)]
    changed = {name: each for name, each in settings.items() if name in (*wanted, *gone)}
    show(
        lambda: _rows(changed) if given or gone else f"{_rows(settings)}\n\n{columns(facts)}",
        {
            "version": __version__,
            "compiler": None if compiler is None else compiler._asdict(),
            "settings": settings,
        },
    )


@click.command(short_help="Print the directory of the cache.")
@directory_option
def path(*, directory: str | None) -> None:
    """Print the directory that programs and commands use as the cache, whether it exists or not."""
    load_settings(directory)  # for its warnings
    write_stdout(os.fsencode(named_directory(directory)) + b"\n")


def _settings(directory: str | None) -> dict[str, dict[str, object]]:
    """Return the value, source, variable and saved text of every setting, by its name."""
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
    """Return the value of a setting for JSON; remotes become addresses without credentials."""
    if isinstance(value, tuple):
        return [str(each) for each in value]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return value


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name.endswith("_size"):
        return format_size(value)
    if isinstance(value, list):
        return " ".join(value) or "-"  # pyright: ignore[reportUnknownArgumentType]
    return "-" if value is None else str(value)


def save(directory: str, given: Mapping[str, str], gone: Collection[str] = ()) -> list[str]:
    """Save the settings `given`, remove the saved settings `gone`, and return warnings.

    A warning says that a saved setting has no effect because a variable overrides it, or that the
    cache's entries are in another backend.

    Args:
        directory: path of the cache's directory, which is created if it does not exist.
        given: maps the names of settings to their values, as text.
        gone: names of settings. They may be settings that another version of kcache saved.

    Raises:
        ConfigError: a setting can't be saved, its value is not allowed, or the backend rejects the
            cap; or the directory is unsafe, or not a cache.
        UnknownBackendError: the backend to save is not installed.
        BackendError: the settings can't be written, or the backend can't use the directory.
    """
    files = open_directory(directory)
    for name, text in given.items():
        parse_saved(name, text)
    for name in gone:
        if name not in files.settings:
            require_saved(name)
    warnings: list[str] = []

    def change(settings: dict[str, object]) -> None:
        for name in gone:
            settings.pop(name, None)
        settings.update(given)
        config = Config.load(environ={}).with_saved(settings, files.marker, warnings.append)
        if given.keys() & {"backend", "max_size"}:
            warnings.append(_elsewhere(config, files))

    change_settings(files, change)
    here = Config.load(complain=lambda _: None)
    sources = {name: getattr(here, name).source for name in given}
    warnings += (
        f"{source} is set, and overrides the saved {name}"
        for name, source in sources.items()
        if source != "default"
    )
    return list(filter(None, warnings))


def _elsewhere(config: Config, files: CacheDirectory) -> str:
    """Return a warning if the entries are in a backend that programs will not open, else nothing.

    Raises:
        ConfigError, BackendError: the backend that `config` names can't be used.
    """
    name, cap = config.backend.value, config.max_size.value
    opened = open_backend(name, files.backend(name), max_size=cap, read_only=True)
    with closing(opened) as backend:
        return other_backend_hint(files, config.backend, backend)


# -- migrate ---------------------------------------------------------------------------------------

#: Why entries of a kind were not moved, for a message. The braces stand for the old backend.
_LEFT_OUT = {
    DAMAGED: "damaged",
    UNREADABLE: "unreadable, and still in the backend {}",
    OTHER: "of another version of kcache, and still in the backend {}",
    TOO_LARGE: "larger than the cap, and still in the backend {}",
}


@click.command(short_help="Move every entry to another backend.")
@click.option(
    "--to", "target", metavar="BACKEND", required=True, help="The new backend, such as zstd."
)
@click.option(
    "--from",
    "origin",
    metavar="BACKEND",
    help="The old backend.  [default: the backend in use; if that is the new backend, the other "
    "backend that has a folder]",
)
@flag("--keep", help="Copy the entries instead of moving them.")
@flag("-n", "--dry-run", help="Show what would be moved; change nothing.")
@json_option("object")
@directory_option
def migrate(
    *, target: str, origin: str | None, keep: bool, dry_run: bool, directory: str | None
) -> None:
    """Move every entry to another backend in the same directory.

    Each backend has its own folder in the directory. Entries are moved one at a time, the least
    recently used first. This keeps their order of use, but not the times: each entry counts as used
    when it is moved. The two backends together stay below the cap. If the command is interrupted,
    run it again to continue. At the end, it saves the new backend as a setting of the directory.
    Programs then use the new backend, unless an argument or KCACHE_BACKEND names another. If the
    entries are already in the new backend, the command changes nothing.
    """
    if origin == target:
        raise click.UsageError(f"--from and --to both name {target}.")
    origin = origin or _origin(directory, target)
    require_backend(origin)
    require_backend(target)
    moved, verb, done = Moved(), "copied" if keep else "moved", "nothing to move"
    with open_existing(directory, "migrate", backend=origin, writes=not dry_run) as source:
        files, engine = source.opened.directory, source.engine
        if files is not None and origin == target:
            files, done = None, f"the entries are already in {target}: nothing to migrate"
        elif files is not None and dry_run:
            usage = engine.backend.usage()
            moved, verb = Moved(usage.entries, usage.bytes), f"would {'copy' if keep else 'move'}"
        elif files is not None:
            with (
                open_cache(files.path, backend=target) as destination,
                progress(f"{origin} to {target}", engine.entry_count) as advance,
            ):
                moved = move_entries(engine, destination.engine, keep=keep, advance=advance)
            if not keep:
                engine.note("moved", detail=f"to {target}")
    amount = f"{counted(moved.entries)}, {format_size(moved.size)}"
    if files is not None:
        done = f"{verb} {amount}{'' if dry_run else ','} from {origin} to {target}"
        if moved.all and not keep:
            remove_emptied(files.backend(origin))  # LMDB does not shrink its file
    if moved.evicted:
        evicted = format_size(moved.evicted)
        notify(f"evicted {evicted} to make room: both backends together exceeded the cap")
    kinds = Counter(item.kind for item in moved.left_out)
    for kind in kinds:
        notify(f"left out {counted(kinds[kind])}: {_LEFT_OUT[kind].format(origin)}")
    record = {
        "from": origin,
        "to": target,
        "keep": keep,
        "dry_run": dry_run,
        "entries": moved.entries,
        "size_bytes": moved.size,
        "left_out": {kind: kinds[kind] for kind in _LEFT_OUT},
    }
    show(done, record)
    if files is not None and not dry_run:
        _use(files, target, keep=keep)


def _use(files: CacheDirectory, target: str, *, keep: bool) -> None:
    """Save `target` as the backend of the directory, or, with `keep`, print how to do that."""
    if keep:
        show(f"To use the copies, run kcache config --set backend={target}")
        return
    try:
        warnings = save(files.path, {"backend": target})
    except KcacheError as error:
        notify(f"warning: {error}. To use the moved entries, set KCACHE_BACKEND={target}")
        return
    show(f"Saved with the cache: backend={target}. Programs with this directory now use {target}.")
    for warning in warnings:
        notify(f"warning: {warning}")


def _origin(directory: str | None, target: str) -> str:
    """Return the name of the backend that programs use now.

    If that is `target`, return the other backend that has a folder, or `target` if there is none.

    Raises:
        UsageError: several other backends have a folder.
    """
    settings, _ = load_settings(directory, complain=None)
    others: list[str] = []
    if settings.backend.value == target:
        with suppress(OSError):  # the directory does not exist
            others = backends_in(CacheDirectory(named_directory(directory)))
    others = [each for each in others if each != target]
    if len(others) > 1:
        raise click.UsageError(f"--from: expected one of {', '.join(others)}, got none.")
    return others[0] if others else settings.backend.value
