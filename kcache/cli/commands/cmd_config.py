"""`kcache config` shows and saves settings, `kcache path` prints the cache's directory.

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
def config(*, given: tuple[str, ...], gone: tuple[str, ...], directory: str | None) -> None:
    """Show every setting with its value and its source, and the compiler that kcache uses.

    A setting that is saved with `--set` stays with the directory of the cache, in its file
    kcache.json. It applies to every program and command that uses the directory. Arguments and
    environment variables take precedence. These settings can be saved: backend, max_size,
    memory_size, header_check, relocation, wait, workers, compile_timeout.
    """
    wanted: dict[str, str] = {}
    for pair in given:
        name, separator, value = pair.partition("=")
        if not separator:
            raise click.UsageError(f"--set {pair!r}: write NAME=VALUE, such as max_size=5GiB.")
        wanted[name.strip()] = value.strip()
    both = sorted(wanted.keys() & set(gone))
    if both:
        raise click.UsageError(f"--set and --unset exclude each other: {', '.join(both)}.")
    if given or gone:
        may_write("config --set", directory)
        for warning in save(named_directory(directory), wanted, gone):
            notify(f"warning: {plain(warning)}")
    settings, compiler = _settings(directory), library.find()
    facts = [("kcache", __version__)]
    if compiler is None:
        facts.append(("compiler", f"none: {library.HOW_TO_INSTALL}"))
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
    load_settings(directory)  # this warns
    write_stdout(os.fsencode(named_directory(directory)) + b"\n")


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
    if isinstance(value, int) and name.endswith("_size"):
        return format_size(value)
    if isinstance(value, list):
        return " ".join(value) or "-"  # pyright: ignore[reportUnknownArgumentType]
    return "-" if value is None else str(value)


def save(directory: str, given: Mapping[str, str], gone: Collection[str] = ()) -> list[str]:
    """Save settings, forget others, and return warnings about settings without effect.

    Args:
        directory: of the cache, created if it does not exist.
        given: name -> text.
        gone: names; settings that another version of kcache has saved are allowed, too.

    Raises:
        ConfigError: a setting can't be saved, its value is not allowed, or not with that backend;
            or the directory is unsafe, or not a cache.
        UnknownBackendError: no such backend is installed.
        BackendError: the settings can't be written, or the backend can't be used there.
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
        f"{source} is set, and comes before the {name} that is saved"
        for name, source in sources.items()
        if source != "default"
    )
    return list(filter(None, warnings))


def _elsewhere(config: Config, files: CacheDirectory) -> str:
    """Return a warning if the entries are in another backend than the one that programs will open.

    Raises:
        ConfigError, BackendError: programs could not use that backend.
    """
    name, cap = config.backend.value, config.max_size.value
    opened = open_backend(name, files.backend(name), max_size=cap, read_only=True)
    with closing(opened) as backend:
        return other_backend_hint(files, config.backend, backend)


# -- migrate ---------------------------------------------------------------------------------------

#: The message for entries that are not moved, by kind.
_LEFT_OUT = {
    DAMAGED: "damaged: left out",
    UNREADABLE: "unreadable: left in {}",
    OTHER: "of another version of kcache: left in {}",
    TOO_LARGE: "larger than the cap: left in {}",
}


@click.command(short_help="Move every entry to another backend.")
@click.option(
    "--to", "target", metavar="BACKEND", required=True, help="The new backend, such as zstd."
)
@click.option(
    "--from",
    "origin",
    metavar="BACKEND",
    help="The old backend.  [default: the one in use; if that is BACKEND, another with a folder]",
)
@flag("--keep", help="Copy the entries, and keep the old ones.")
@flag("-n", "--dry-run", help="Show what would be moved; change nothing.")
@json_option("object")
@directory_option
def migrate(
    *, target: str, origin: str | None, keep: bool, dry_run: bool, directory: str | None
) -> None:
    """Move every entry to another backend in the same directory.

    Each backend has its own folder there. The entries move one at a time, the least recently used
    one first. So the order of use is kept, but not the times: each entry counts as used now. Both
    backends together stay below the cap. If the command is interrupted, run it again and it
    continues. At the end, it saves the new backend with the directory. Programs then use the new
    backend, unless an argument or KCACHE_BACKEND names another. If the entries are in the new
    backend already, the command changes nothing.
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
            files, done = None, f"already in {target}; nothing to migrate"
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
            remove_emptied(files.backend(origin))  # LMDB's file does not shrink
    if moved.evicted:
        notify(f"{format_size(moved.evicted)} evicted first: both backends exceeded the cap")
    kinds = Counter(item.kind for item in moved.left_out)
    for kind in kinds:
        notify(f"{counted(kinds[kind])} {_LEFT_OUT[kind].format(origin)}")
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
    """Save the backend with the directory, unless the old one is kept."""
    if keep:
        show(f"To use them: kcache config --set backend={target}")
        return
    try:
        warnings = save(files.path, {"backend": target})
    except KcacheError as error:
        notify(f"warning: {error}. To use them: export KCACHE_BACKEND={target}")
        return
    show(f"Saved with the cache: backend={target}. Programs of this directory find them there.")
    for warning in warnings:
        notify(f"warning: {warning}")


def _origin(directory: str | None, target: str) -> str:
    """Return the backend that programs use now; if that is the target, another with a folder."""
    settings, _ = load_settings(directory, complain=None)
    others: list[str] = []
    if settings.backend.value == target:
        with suppress(OSError):  # there is no cache
            others = backends_in(CacheDirectory(named_directory(directory)))
    others = [each for each in others if each != target]
    if len(others) > 1:
        raise click.UsageError(f"Several backends have a folder: name one, --from {others[0]}.")
    return others[0] if others else settings.backend.value
