"""`kcache show` shows all that is known about an entry, `kcache extract` writes its output."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import click

from kcache.cli.listing import SHORT, item_json, key_argument, open_entry
from kcache.cli.parameters import directory_option, json_option, output_option
from kcache.cli.terminal import (
    OUTPUTS,
    STDOUT,
    columns,
    named_by_suffix,
    notify,
    refuse_terminal,
    show,
    write_output,
)
from kcache.errors import BackendError, CorruptEntryError
from kcache.nvrtc.entries import MANIFEST, Item
from kcache.nvrtc.manifest import DependencySet, Manifest
from kcache.nvrtc.metadata import stored_log
from kcache.util.units import counted, format_age, format_size, format_time, local_time

if TYPE_CHECKING:
    from kcache.entry import JSON, Entry

#: Metadata that has a line of its own in `show`.
_TOLD = {
    *("kind", "source_name", "names", "arch", "created", "compile_seconds", "lowered_names"),
    "functions",
    *("compiler", "flags", "log"),
    *("files", "one_stream"),
}


#: The role of a dependency set's files: the names in `DependencySet`, and the words that users see.
_KINDS = {
    "files": "headers that were read, and their digests",
    "absent": "paths where nothing must be",
    "present": "files that must be there",
    "folders": "directories that must be there",
    "names": "names of texts that are in memory",
    "same": "names of equal files; equal numbers are one file",
    "denied": "paths that can't be read",
    "variables": "environment variables",
}


@click.command("show", short_help="Show all that is known about one entry.")
@key_argument
@json_option("object")
@directory_option
def show_entry(*, key: str, as_json: bool, directory: str | None) -> None:
    """Show all that is known about the entry KEY, the first digits of a key from `kcache ls`.

    For a kernel: its source, target, names, compiler, options and log, and the sizes of its
    outputs. For a manifest: the headers that the compiler read, and the headers that must be
    absent.
    """
    item, entry = open_entry(directory, key)
    show(_as_json(item, entry) if as_json else "\n".join(_lines(item, entry)))
    if entry is None:
        raise _unused(item)


def _unused(item: Item) -> CorruptEntryError:
    return CorruptEntryError(f"entry {item.key[:SHORT]} is not used: {item.problem}")


@click.command(short_help="Write a kernel's machine code or PTX to a file.")
@key_argument
@click.option(
    "--emit",
    type=click.Choice(OUTPUTS),
    help="The output to write.  [default: by the suffix of OUT, else the first of these that "
    "there is]",
)
@output_option(".  [default: the key's first digits, with the suffix of what is written]")
@directory_option
def extract(*, key: str, emit: str | None, output: str | None, directory: str | None) -> None:
    """Write the output of the entry KEY to a file, for `cuobjdump`, `nvdisasm` and other tools.

    KEY is the first digits of a key. `kcache ls` shows the keys.
    """
    item, entry = open_entry(directory, key)
    if entry is None:
        raise _unused(item)
    emit = emit or named_by_suffix(output) or next(filter(entry.payload.get, OUTPUTS), OUTPUTS[0])
    data = entry.payload.get(emit)
    if data is None:
        there = ", ".join(entry.payload) or "nothing"
        raise BackendError(f"{item.kind} {item.key[:SHORT]} has no {emit}; it has: {there}")
    if output is None:
        output = f"{item.key[:SHORT]}.{emit}"
    if output == "-":
        refuse_terminal(emit)
    write_output(data, output)
    shown = STDOUT if output == "-" else output
    notify(
        f"{emit} of {item.source_name or item.key[:SHORT]} -> {shown} ({format_size(len(data))})"
    )


# -- as text ---------------------------------------------------------------------------------------


def _lines(item: Item, entry: Entry | None) -> Iterator[str]:
    metadata: Mapping[str, JSON] = {} if entry is None else entry.metadata
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
    more = [name for name in metadata if name not in _TOLD]
    rows |= {n: _text(metadata[n]) for n in ("compiler", "flags", *more) if n in metadata}
    yield columns((name, text) for name, text in rows.items() if text)
    if entry is None:
        return
    yield from _block("sections", ((n, format_size(len(d))) for n, d in entry.payload.items()))
    yield from _block("files", _files(metadata.get("files")))
    lowered = metadata.get("lowered_names")
    known = lowered if isinstance(lowered, dict) else {}
    names = {**dict.fromkeys(item.names, ""), **known}
    yield from _block("names", ((name, _text(value)) for name, value in names.items()))
    log = stored_log(metadata)
    yield from _block("log", ((line,) for line in log.splitlines()))
    if item.kind == MANIFEST:
        for number, dependency_set in enumerate(_dependency_sets(entry)):
            yield from _dependency_set(number, dependency_set)


def _files(listed: JSON) -> Iterator[tuple[str, ...]]:
    """Yield the permissions and the path of each file that nvcc wrote."""
    for each in listed if isinstance(listed, list) else ():
        match each:
            case [str(path), int(mode), *_]:
                yield f"{mode:04o}", path


def _block(title: str, rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield a title and indented rows below it; nothing if there are none."""
    table = [("", *row) for row in rows]
    if table:
        yield f"\n{title}"
        yield columns(table)


def _dependency_set(number: int, dependency_set: DependencySet) -> Iterator[str]:
    found = _paths(dependency_set)
    locations = counted(len(dependency_set.stamps), "location")
    yield f"\ndependency set {number}, checked in {locations}"
    for name, rows in found.items():
        table = (tuple(map(str, row.values())) for row in rows)
        yield from _block(f"{_KINDS[name]} ({len(rows)})", table)
    yield from _block(
        "conditions elsewhere", ((each,) for each in dependency_set.answers().conditions)
    )


def _text(value: JSON) -> str:
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value)


def _time(seconds: float) -> str:
    moment = local_time(seconds)
    return f"{moment:%Y-%m-%d %H:%M:%S %z} ({format_age(time.time() - seconds)} ago)"


# -- as JSON ---------------------------------------------------------------------------------------


def _as_json(item: Item, entry: Entry | None) -> dict[str, object]:
    known = item_json(item)
    if entry is not None:
        known["sections"] = {name: len(data) for name, data in entry.payload.items()}
        known["metadata"] = dict(entry.metadata)
        if item.kind == MANIFEST:
            known["dependency_sets"] = [
                {**_paths(dependency_set), "conditions": dependency_set.answers().conditions}
                for dependency_set in _dependency_sets(entry)
            ]
    return known


def _dependency_sets(entry: Entry) -> list[DependencySet]:
    return Manifest.from_entry(entry).dependency_sets


def _paths(dependency_set: DependencySet) -> dict[str, list[dict[str, str | int]]]:
    """Return the files of a dependency set by their meaning; see `_KINDS`."""
    found = dependency_set.answers()
    raw, start = dependency_set.raw, found.digests_at
    digests = (raw[n : n + 16].hex() for n in range(start, len(raw), 16))
    return {
        "files": [
            {**_at(root, path), "digest": next(digests)}
            for root, paths in found.files
            for path in paths
        ],
        "absent": [_at(root, path) for root, paths in found.absent for path in paths],
        **{n: [_at(*each) for each in getattr(found, n)] for n in ("present", "folders", "names")},
        "same": [{"number": number, **_at(*each)} for number, each in found.same],
        "denied": [{"error": os.strerror(error), **_at(*each)} for error, each in found.denied],
        "variables": [
            {"name": name, "value": "(not set)" if value is None else value}
            for name, value in found.variables
        ],
    }


def _at(root: int, path: str) -> dict[str, str | int]:
    """Return a path, and in words what it starts from."""
    beside = f"include path {root}" if root else "source's folder"
    return {"root": "absolute" if root < 0 else beside, "path": path}
