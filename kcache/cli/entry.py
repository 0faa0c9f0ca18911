"""Commands about one entry: `kcache show` and `kcache extract`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import click

from kcache.age import format_age, local_time
from kcache.catalogue import MANIFEST, Item, Opened, look_into
from kcache.cli.cache import directory_option, json_option, open_existing
from kcache.cli.keys import SHORT, key_prefix, resolve
from kcache.cli.listing import item_json
from kcache.cli.output import (
    OUTPUTS,
    OutputPath,
    named_by_suffix,
    refuse_terminal,
    write_output,
)
from kcache.cli.terminal import STDOUT, columns, plain, say, show
from kcache.errors import BackendError, CorruptEntryError
from kcache.info import format_size, format_time
from kcache.kernel_cache import PRODUCER

if TYPE_CHECKING:
    from kcache.entry import JSON, Entry
    from kcache.nvrtc.manifest import Variant

__all__ = ["extract", "show_entry"]

_key_argument = click.argument("key", type=key_prefix, metavar="KEY")

#: Metadata that `show` has a line of its own for.
_TOLD = {
    *("kind", "source_name", "names", "arch", "created", "compile_seconds", "lowered_names"),
    *("compiler", "flags", "log"),
}


#: What the files of a header set are, as `HeaderSet` calls them and in words.
_PLACES = {
    "files": "headers that were read, and their digests",
    "absent": "files that must be absent",
    "present": "files that must be there",
    "trees": "directories that must hold no other files",
    "once": "files of equal content with #pragma once",
}


@click.command("show", short_help="Show everything that is known of one entry.")
@_key_argument
@json_option("object")
@directory_option
def show_entry(*, key: str, as_json: bool, directory: str | None) -> None:
    """Show everything that is known of the entry KEY, the first digits of a key from `kcache ls`.

    Of a kernel: its source, target, names, compiler, options and log, and the sizes of what was
    stored. Of a manifest: which headers were read, and which must be absent.
    """
    item, entry = _open(directory, key)
    if as_json:
        show(json.dumps(_as_json(item, entry), indent=2))
    else:
        show("\n".join(_lines(item, entry)))
    if entry is None:
        raise CorruptEntryError(f"entry {item.key[:SHORT]} is not used: {plain(item.problem)}")


@click.command(short_help="Write a kernel's machine code or PTX to a file.")
@_key_argument
@click.option(
    "--emit",
    type=click.Choice(OUTPUTS),
    help="What to write.  [default: as the suffix of OUT says, else the first of these that "
    "there is]",
)
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    type=OutputPath(),
    help="Where to write it, - for standard output.  [default: the key's first digits, with the "
    "suffix of what is written]",
)
@directory_option
def extract(*, key: str, emit: str | None, output: str | None, directory: str | None) -> None:
    """Write what was compiled for the entry KEY, for `cuobjdump`, `nvdisasm` and other tools.

    KEY is the first digits of a key that `kcache ls` shows.
    """
    item, entry = _open(directory, key)
    if entry is None:
        raise CorruptEntryError(f"entry {item.key[:SHORT]} is not used: {plain(item.problem)}")
    emit = emit or named_by_suffix(output) or next(filter(entry.payload.get, OUTPUTS), OUTPUTS[0])
    data = entry.payload.get(emit)
    if data is None:
        there = ", ".join(map(plain, entry.payload)) or "nothing"
        raise BackendError(f"{item.kind} {item.key[:SHORT]} has no {emit}; it has: {there}")
    if output is None:
        output = f"{item.key[:SHORT]}.{emit}"
    if output == "-":
        refuse_terminal(emit)
    write_output(data, output)
    place = STDOUT if output == "-" else output
    say(
        f"{emit} of {plain(item.source_name) or item.key[:SHORT]} -> {place} "
        f"({format_size(len(data))})"
    )


def _open(directory: str | None, key: str) -> Opened:
    """Return the entry that the beginning of a key means.

    Raises:
        BackendError: it means none or several.
    """
    cache = open_existing(directory)
    if cache is None:
        resolve(None, [key])
    else:
        with cache:
            (info,) = resolve(cache.engine.backend, [key])
            opened = look_into(cache.engine.backend, info, PRODUCER)
        if opened is not None:
            return opened
    raise BackendError(f"the entry {key[:SHORT]} was deleted meanwhile")


# -- as text ---------------------------------------------------------------------------------------


def _lines(item: Item, entry: Entry | None) -> Iterator[str]:
    metadata: Mapping[str, JSON] = {} if entry is None else entry.metadata
    rows = [
        ("key", item.key),
        ("kind", item.kind),
        *((("problem", item.problem),) if item.problem else ()),
        *((("source", item.source_name),) if item.source_name else ()),
        *((("arch", item.arch),) if item.arch else ()),
        ("stored size", format_size(item.size)),
        ("last use", _time(item.used)),
    ]
    if item.created is not None:
        rows.append(("created", _time(item.created)))
    if item.compile_seconds is not None:
        rows.append(("compile time", format_time(item.compile_seconds)))
    rows += [(n, _text(metadata[n])) for n in ("compiler", "flags") if n in metadata]
    rows += [(name, _text(value)) for name, value in metadata.items() if name not in _TOLD]
    yield columns((plain(name), plain(value)) for name, value in rows)
    if entry is None:
        return
    yield from _block("sections", ((n, format_size(len(d))) for n, d in entry.payload.items()))
    lowered = metadata.get("lowered_names")
    known = lowered if isinstance(lowered, dict) else {}
    names = {**dict.fromkeys(item.names, ""), **known}
    yield from _block("names", ((name, _text(value)) for name, value in names.items()))
    log = str(metadata.get("log") or "")
    yield from _block("log", ((line,) for line in log.splitlines()))
    if item.kind == MANIFEST:
        for number, variant in enumerate(_variants(entry)):
            yield from _header_set(number, variant)


def _block(title: str, rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield a title and indented rows below it; nothing if there are none."""
    table = [("", *map(plain, row)) for row in rows]
    if table:
        yield f"\n{title}"
        yield columns(table)


def _header_set(number: int, variant: Variant) -> Iterator[str]:
    found = _places(variant)
    places = len(variant.stamps)
    yield f"\nheader set {number}, checked in {places} place{'' if places == 1 else 's'}"
    for name, rows in found.items():
        table = (tuple(map(str, row.values())) for row in rows)
        yield from _block(f"{_PLACES[name]} ({len(rows)})", table)
    if variant.sections().paths:
        yield "\nThe outcome holds paths: it is good for these directories only."


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
            known["header_sets"] = [
                {**_places(variant), "paths": variant.sections().paths}
                for variant in _variants(entry)
            ]
    return known


def _variants(entry: Entry) -> list[Variant]:
    from kcache.nvrtc.manifest import Manifest

    return Manifest.from_entry(entry).variants


def _places(variant: Variant) -> dict[str, list[dict[str, str | int]]]:
    """Return the files of a header set by what they mean; see `_PLACES`."""
    sections = variant.sections()
    at = sections.digests_at
    digests = (variant.raw[n : n + 16].hex() for n in range(at, len(variant.raw), 16))
    return {
        "files": [
            {"root": _root(root), "path": path, "digest": next(digests)}
            for root, paths in sections.files
            for path in paths
        ],
        "absent": [
            {"root": _root(root), "path": path} for root, paths in sections.absent for path in paths
        ],
        "present": [{"root": _root(root), "path": path} for root, path in sections.present],
        "trees": [{"root": _root(root)} for root in sections.trees],
        "once": [
            {"number": number, "root": _root(place.root), "path": place.path}
            for number, place in sections.once
        ],
    }


def _root(root: int) -> str:
    """Return what a header's path starts from, in words."""
    if root < 0:
        return "absolute"
    return f"include path {root}" if root else "source's folder"
