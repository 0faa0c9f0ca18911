"""`kcache ls` lists the entries of a cache, `show` shows one, `extract` writes its output.

A user may shorten a key to any unique prefix of at least four digits.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import click
from click.shell_completion import CompletionItem

from kcache.admin.transfer import selection
from kcache.backend import KEY_LENGTH, Backend, EntryInfo
from kcache.cli.options import (
    cache_options,
    directory_option,
    filter_options,
    flag,
    open_existing,
    output_option,
)
from kcache.cli.terminal import (
    OUTPUTS,
    SHORT,
    columns,
    named_by_suffix,
    notify,
    refuse_terminal,
    show,
    wants_json,
    width,
    write_output,
)
from kcache.entry import JSON, Entry
from kcache.errors import BackendError, CorruptEntryError
from kcache.nvrtc.entries import (
    DAMAGED,
    KERNEL,
    MANIFEST,
    UNREADABLE,
    Item,
    Opened,
    items,
    look_into,
    matching,
    unique_length,
)
from kcache.nvrtc.manifest import DependencySet, Manifest
from kcache.nvrtc.metadata import stored_log
from kcache.util.units import counted, format_age, format_size, format_time, local_time

#: How many keys a message about an ambiguous prefix names.
_NAMED = 8
_LEAST = 4
#: How many keys the shell's completion offers at most.
_OFFERED = 2000


# -- keys, as they are typed -----------------------------------------------------------------------


def key_prefix(text: str) -> str:
    """Return `text` in lower case if it is a key or a long enough prefix of a key.

    Raises:
        BadParameter: `text` is neither.
    """
    digits = text.strip().lower()
    if not _LEAST <= len(digits) <= KEY_LENGTH or digits.strip("0123456789abcdef"):
        amount = f"{_LEAST} to {KEY_LENGTH} hexadecimal digits"
        expected = f"{amount}, the first digits of a key from `kcache ls`"
        raise click.BadParameter(f"expected {expected}, got {text!r}")
    return digits


def complete_keys(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the keys that begin with the typed text, the most recently used first.

    If anything fails, return no keys and print no warning, because it would appear in the line that
    the user is typing.
    """
    logging.getLogger("kcache").disabled = True
    with suppress(Exception), open_existing(ctx.params.get("directory"), quiet=True) as cache:
        typed = incomplete.strip().lower()
        fitting = (info for info in cache.engine.backend.scan() if info.key.startswith(typed))
        infos = sorted(islice(fitting, _OFFERED), key=lambda info: -info.used_ns)
        digits = max(unique_length((info.key for info in infos), least=SHORT), len(typed))
        return [CompletionItem(info.key[:digits]) for info in infos]
    return []


_key = click.argument("key", type=key_prefix, metavar="KEY", shell_complete=complete_keys)


def resolve(backend: Backend, prefixes: Iterable[str]) -> list[EntryInfo]:
    """Return the entries whose keys begin with one of the prefixes, each entry once.

    Raises:
        BackendError: a prefix matches no entry or several entries.
    """
    found = matching(backend, list(dict.fromkeys(prefixes)))
    for prefix, infos in found.items():
        if not infos:
            raise BackendError(f"no entry has a key that begins with {prefix}")
        if len(infos) > 1:
            digits = unique_length((info.key for info in infos), least=SHORT)
            shown = ", ".join(info.key[:digits] for info in infos[:_NAMED])
            more = f" and {len(infos) - _NAMED} more" if len(infos) > _NAMED else ""
            what = f"{len(infos)} entries have keys that begin with {prefix}"
            raise BackendError(f"{what}: {shown}{more}")
    return list({infos[0].key: infos[0] for infos in found.values()}.values())


def _open(directory: str | None, key: str) -> Opened:
    """Return the entry whose key begins with `key`.

    Raises:
        BackendError: there is no such entry, or there are several.
    """
    with open_existing(directory) as cache:
        (info,) = resolve(cache.engine.backend, [key])
        opened = look_into(cache.engine.backend, info)
    if opened is None:
        raise BackendError(f"the entry {key[:SHORT]} no longer exists")
    return opened


def _unused(item: Item) -> CorruptEntryError:
    return CorruptEntryError(f"entry {item.key[:SHORT]} can't be used: {item.problem}")


# -- ls --------------------------------------------------------------------------------------------

#: Maps each sort order to a function that returns the value by which an entry is sorted. The
#: largest value comes first.
_ORDERS: dict[str, Callable[[Item], float | None]] = {
    "last-use": lambda item: item.used,
    "size": lambda item: item.size,
    "age": lambda item: item.created,
    "compile-time": lambda item: item.compile_seconds,
}


@click.command("ls", short_help="List the kernels in the cache.")
@click.option(
    "--sort",
    type=click.Choice(list(_ORDERS)),
    default="last-use",
    show_default=True,
    help="Sort by latest use, largest size, youngest age or longest compile.",
)
@flag("--reverse", help="Reverse the order. Entries that lack the value stay last.")
@flag("-a", "--all", "everything", help="List manifests, too.")
@filter_options
@cache_options("array")
def list_entries(
    *,
    sort: str,
    reverse: bool,
    everything: bool,
    directory: str | None,
    **given: Any,  # noqa: ANN401
) -> None:
    """List the kernels in the cache, one line each.

    KEY is the beginning of an entry's key, long enough to be unique. Other commands accept it as
    their KEY argument. AGE is the time since the compile, and COMPILE is the time that
    the compile took. Damaged entries and entries of another version of kcache are marked. Listing
    an entry does not count as a use of it. If kernels differ only in their options, the list shows
    these options. On a narrow terminal, it leaves out columns so that there is room for the names.

    With --all, the list also has manifests. A manifest records which headers a source was compiled
    with, so that kcache notices when a header changes. A source with includes has one manifest for
    each set of options.
    """
    now, wanted = time.time(), selection(**given)
    with open_existing(directory) as cache:
        found = list(items(cache.engine.backend))

    def order(item: Item) -> tuple[bool, float, str]:
        value = _ORDERS[sort](item)
        return value is None, (value or 0) * (1 if reverse else -1), item.key

    shown = wanted or (lambda item: everything or item.kind != MANIFEST)
    rows = sorted(filter(shown, found), key=order)
    digits = unique_length(item.key for item in found)
    show(lambda: listing(rows, digits, now), [item_json(item) for item in rows])
    if not (rows or wants_json()) and cache.directory:
        notify("there are no kernels" if wanted is None else "no kernel matches the filters")


#: Maps columns to the width that a terminal needs to show them, in characters. On a narrower
#: terminal, they would take the room of the kernel's name.
_NEEDS = {"COMPILE": 100, "AGE": 90, "USED": 70, "SIZE": 60, "ARCH": 50}


def listing(items: Sequence[Item], digits: int, now: float, *, used: bool = True) -> str:
    """Return a table with one line per entry, or an empty text if there are no entries.

    On a terminal, lines are cut to its width. If several kernels have the same source name, names
    and target, the options that differ are shown after the name.

    Args:
        items: the entries, in the order of the lines.
        digits: how many digits of each key to show.
        now: the current time, in seconds since the epoch.
        used: whether to show when each entry was last used.
    """
    room = width()
    rows: list[dict[str, str]] = []
    for item, more in zip(items, _differences(items), strict=True):
        seconds = item.compile_seconds
        row = {
            "KEY": item.key[:digits],
            "SIZE": format_size(item.size),
            "AGE": "-" if item.created is None else format_age(now - item.created),
            "USED": format_age(now - item.used),
            "COMPILE": "-" if seconds is None else format_time(seconds),
            "ARCH": item.arch or "-",
            "KERNEL": f"{_name(item, short=room is not None)}  {more}".rstrip(),
        }
        rows.append(row)
    wide = [head for head in _HEADS if room is None or room >= _NEEDS.get(head, 0)]
    heads = [head for head in wide if used or head != "USED"]
    table = [tuple(heads), *(tuple(row[head] for head in heads) for row in rows)]
    return columns(table, fit=True) if rows else ""


_HEADS = ("KEY", "SIZE", "AGE", "USED", "COMPILE", "ARCH", "KERNEL")


def _name(item: Item, *, short: bool) -> str:
    """Return a kernel's name, with `short` without the source's folder; else what the entry is."""
    if item.kind == KERNEL:
        name = os.path.basename(item.source_name) if short else item.source_name
        return item._replace(source_name=name).title or "-"
    if item.kind in (DAMAGED, UNREADABLE):
        return f"({item.kind}: {item.problem})"
    return f"({item.problem or item.kind})"


def item_json(item: Item) -> dict[str, object]:
    """Return an item for JSON. Sizes are in bytes, and times in seconds since the epoch."""
    names = {"size": "size_bytes", "used": "last_use"}
    fields = item._asdict().items()
    return {names.get(name, name): None if value == "" else value for name, value in fields}


def _differences(items: Sequence[Item]) -> list[str]:
    """Return for each entry the options that distinguish it from other kernels of its name.

    Identities of compilers are treated like options.
    """
    facts = [(*item.flags, f"({item.compiler})") if item.compiler else item.flags for item in items]
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, item in enumerate(items):
        if item.kind == KERNEL:
            groups.setdefault((item.source_name, item.names, item.arch), []).append(number)
    found = [""] * len(items)
    for numbers in groups.values():
        common = set(facts[numbers[0]]).intersection(*(facts[number] for number in numbers))
        for number in numbers:
            own = " ".join(each for each in facts[number] if each not in common)
            found[number] = f"[{own}]" if own else ""
    return found


# -- show ------------------------------------------------------------------------------------------

#: Metadata that has a line or a block of its own in `show`.
_PLACED = {
    *("kind", "source_name", "names", "arch", "created", "compile_seconds", "lowered_names"),
    *("functions", "compiler", "flags", "log", "files"),
}
#: Maps the parts of a dependency set (fields of `Answers`) to the words that users see.
_KINDS = {
    "files": "headers that were read, and their digests",
    "absent": "paths that must not exist",
    "present": "files that must exist",
    "folders": "directories that must exist",
    "names": "names of in-memory headers",
    "same": "paths of files with equal content; paths with equal numbers must be the same file",
    "denied": "paths that can't be read",
    "variables": "environment variables",
    "plain": "paths that must not be symbolic links",
    "links": "symbolic links, and their targets",
    "access": "access rights, as access(2) returns them",
    "times": "files of equal content: a group, and a number for each modification time",
    "conditions": "conditions for the use in other directories",
}


@click.command("show", short_help="Show all details of one entry.")
@_key
@cache_options("object")
def show_entry(*, key: str, directory: str | None) -> None:
    """Show all details of the entry whose key begins with KEY. `kcache ls` shows the keys.

    For a kernel, these are its source, target, names, compiler, options and log, and the sizes of
    its outputs. For a manifest, they are the headers that the compiler read, and the paths where no
    header may appear.
    """
    item, entry = _open(directory, key)
    record = item_json(item)
    if entry is not None:
        record["sections"] = {name: len(data) for name, data in entry.payload.items()}
        record["metadata"] = dict(entry.metadata)
        if item.kind == MANIFEST:
            sets = Manifest.from_entry(entry).dependency_sets
            record["dependency_sets"] = [_parts(each) for each in sets]
    show(lambda: "\n".join(_lines(item, entry, record)), record)
    if entry is None:
        raise _unused(item)


def _lines(item: Item, entry: Entry | None, record: Mapping[str, Any]) -> Iterator[str]:
    metadata: Mapping[str, JSON] = record.get("metadata", {})
    rows = {
        "key": item.key,
        "kind": item.kind,
        "problem": item.problem,
        "source": item.source_name,
        "arch": item.arch,
        "stored size": format_size(item.size),
        "last use": _time(item.used),
        "created": "" if item.created is None else _time(item.created),
        "compile time": "" if item.compile_seconds is None else format_time(item.compile_seconds),
    }
    more = [name for name in metadata if name not in _PLACED]
    rows |= {n: _text(metadata[n]) for n in ("compiler", "flags", *more) if n in metadata}
    yield columns((name, text) for name, text in rows.items() if text)
    if entry is None:
        return
    yield from _block("sections", ((n, format_size(s)) for n, s in record["sections"].items()))
    yield from _block("files", _files(metadata.get("files")))
    lowered = metadata.get("lowered_names")
    known = lowered if isinstance(lowered, dict) else {}
    names = {**dict.fromkeys(item.names, ""), **known}
    yield from _block("names", ((name, _text(value)) for name, value in names.items()))
    yield from _block("log", ((line,) for line in stored_log(metadata).splitlines()))
    for number, parts in enumerate(record.get("dependency_sets", ())):
        yield f"\ndependency set {number}, checked in {counted(parts['locations'], 'location')}"
        for name, title in _KINDS.items():
            rows_of = [tuple(map(str, each.values())) for each in parts[name]]
            yield from _block(f"{title} ({len(rows_of)})", rows_of)


def _files(listed: JSON) -> Iterator[tuple[str, ...]]:
    """Yield the permissions and the path of each file that nvcc wrote."""
    for each in listed if isinstance(listed, list) else ():
        match each:
            case [str(path), int(mode), *_] if path:
                yield f"{mode:04o}", path


def _block(title: str, rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield a title and the indented rows below it, or nothing if there are no rows."""
    table = [("", *row) for row in rows]
    if table:
        yield f"\n{title}"
        yield columns(table)


def _text(value: JSON) -> str:
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value)


def _time(seconds: float) -> str:
    moment = local_time(seconds)
    return f"{moment:%Y-%m-%d %H:%M:%S %z} ({format_age(time.time() - seconds)} ago)"


def _parts(dependency_set: DependencySet) -> dict[str, Any]:
    """Return the parts of a dependency set (see `_KINDS`) and the number of its locations."""
    found = dependency_set.answers()
    paths = {
        name: [_at(root, path) for root, paths in getattr(found, name) for path in paths]
        for name in ("files", "absent", "present", "folders", "names", "plain")
    }
    for at, each in enumerate(paths["files"]):
        each["digest"] = found.digests[16 * at : 16 * at + 16].hex()
    return {
        **paths,
        "same": [{"number": number, **_at(*each)} for number, each in found.same],
        "denied": [{"error": os.strerror(error), **_at(*each)} for error, each in found.denied],
        "variables": [
            {"name": name, "value": "(not set)" if value is None else value}
            for name, value in found.variables
        ],
        "links": [{**_at(*path), "to": _at(*to)["path"]} for to, path in found.links],
        "access": [
            {"mode": mode, "granted": granted, **_at(*path)} for mode, granted, path in found.access
        ],
        "times": [
            {"group": group, "number": number, **_at(*path)} for group, number, path in found.times
        ],
        "conditions": [{"condition": each} for each in found.conditions],
        "locations": len(dependency_set.stamps),
    }


def _at(root: int, path: str) -> dict[str, str | int]:
    """Return a path, and the directory that it is relative to in words."""
    relative = f"include path {root}" if root else "source's folder"
    return {"root": "absolute" if root < 0 else relative, "path": path}


# -- extract ---------------------------------------------------------------------------------------


@click.command(short_help="Write a kernel's machine code or PTX to a file.")
@_key
@click.option(
    "--emit",
    type=click.Choice(OUTPUTS),
    help="The output to write.  [default: the one that the suffix of OUT names, else the first of "
    "these that the entry has]",
)
@output_option(".  [default: the key's first digits, with the suffix of the output]")
@directory_option
def extract(*, key: str, emit: str | None, output: str | None, directory: str | None) -> None:
    """Write an output of a kernel to a file, for `cuobjdump`, `nvdisasm` and other tools.

    KEY is the first digits of the kernel's key. `kcache ls` shows the keys.
    """
    item, entry = _open(directory, key)
    if entry is None:
        raise _unused(item)
    emit = emit or named_by_suffix(output) or next(filter(entry.payload.get, OUTPUTS), OUTPUTS[0])
    data = entry.payload.get(emit)
    if data is None:
        there = ", ".join(entry.payload) or "nothing"
        raise BackendError(f"{item.kind} {item.key[:SHORT]} has no {emit}; it has: {there}")
    output = output or f"{item.key[:SHORT]}.{emit}"
    if output == "-":
        refuse_terminal(emit)
    shown, name = write_output(data, output), item.source_name or item.key[:SHORT]
    notify(f"{emit} of {name} -> {shown} ({format_size(len(data))})")
