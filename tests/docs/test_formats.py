"""The page about formats is right: what the code writes can be read by the tables of the page."""

import json
import re
import sqlite3
import struct
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest
import xxhash
import zstandard
from docs.pages import DOCS, blocks

import kcache
from kcache import Entry, KernelCache
from kcache.engine.journal import EVENTS, Journal
from kcache.entry import FORMAT_VERSION, MAX_SECTIONS, MAX_SETS, decode, encode
from kcache.nvrtc import PRODUCER
from kcache.nvrtc.manifest import Manifest
from kcache.readonly.bundle_file import MAX_VALUE
from kcache_backends.file import FileBackend
from kcache_backends.zstd import ZstdBackend

PAGE = DOCS / "reference" / "entry-format.md"
_LINES = PAGE.read_text(encoding="utf-8").splitlines()
_CODES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i64": "q", "f64": "d"}

Row = dict[str, str]
Value = int | float | bytes | str | tuple[float, ...]


def section(heading: str) -> list[str]:
    """Return the lines below a heading, up to the next heading of any level."""
    start = _LINES.index(next(line for line in _LINES if re.fullmatch(rf"#+ {heading}", line)))
    lines, fenced = [], False
    for line in _LINES[start + 1 :]:
        fenced ^= line.startswith("```")
        if line.startswith("#") and not fenced:
            break
        lines.append(line)
    return lines


def tables(heading: str) -> list[list[Row]]:
    """Return the tables below a heading. A row maps the names of the columns to its cells."""
    found: list[list[Row]] = []
    head: list[str] = []
    for line in section(heading):
        if not line.startswith("|"):
            head = []
            continue
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if not head:
            head = cells
            found.append([])
        elif set(line) - set("|-"):
            found[-1].append(dict(zip(head, cells, strict=True)))
    return found


def read(table: list[Row], data: bytes) -> tuple[dict[str, Value], bytes]:
    """Return the fields of `data` by the rows of `table`, and the bytes that are left.

    Reading stops at the first row without a definite size.

    Raises:
        AssertionError: a row's offset differs from the end of the row before it.
    """
    found: dict[str, Value] = {}
    at = 0
    for row in table:
        length = _size(row["size"], found, len(data) - at)
        if length is None:
            break
        if row.get("offset"):
            assert int(row["offset"]) == at, row
        found[row["field"]] = _value(row["type"], data[at : at + length])
        at += length
    return found, data[at:]


def _size(text: str, found: Mapping[str, Value], rest: int) -> int | None:
    if text.isdecimal():
        return int(text)
    if text == "rest":
        return rest
    known = found.get(text)
    return known if isinstance(known, int) else None


def _value(kind: str, raw: bytes) -> Value:
    if kind == "bytes":
        return raw
    if kind == "text":
        return raw.decode()
    code, _, count = kind.removesuffix("]").partition("[")
    values = struct.unpack(f"<{count}{_CODES[code]}", raw)
    return values if count else values[0]


# -- the examples of the page --------------------------------------------------------------------

_ROW = re.compile(r"^([0-9a-f]{8})  ((?:[0-9a-f]{2} ?)+) *\|")


def dumps(heading: str) -> list[bytes]:
    """Return the bytes that the examples below a heading show, with one item for each `dump`."""
    inside = "\n".join(section(heading))
    (block,) = (b for b in blocks(PAGE) if b.language == "text" and b.text in f"{inside}\n")
    found: list[bytes] = []
    expected = -1
    for line in block.text.splitlines():
        row = _ROW.match(line)
        if row is None:
            expected = -1
            continue
        raw = bytes.fromhex(row[2])
        offset = int(row[1], 16)
        if offset == expected:
            found[-1] += raw
        else:
            found.append(raw)
        expected = offset + 16
    return found


# -- envelopes -----------------------------------------------------------------------------------

KEY = bytes(range(32)).hex()
SOURCE = '#include "scale.h"\n__global__ void scale(float* x) { *x *= SCALE; }\n'


def open_envelope(data: bytes) -> tuple[dict, dict[str, bytes], dict]:
    """Read an envelope by the page alone; return its fields, its payload and its metadata."""
    layout, row = tables("Envelope")
    fields, rest = read(layout, data)
    sizes = []
    for _ in range(fields["sections"]):
        found, rest = read(row, rest)
        sizes.append((found["name"], found["size"]))
    length = fields["metadata length"]
    metadata, rest = json.loads(rest[:length]), rest[length:]
    payload = {}
    for name, size in sizes:
        payload[name], rest = rest[:size], rest[size:]
    assert layout[-1]["offset"] == f"total - {len(rest)}"
    assert rest == xxhash.xxh3_128_digest(data[: -len(rest)])
    assert fields["total"] == len(data)
    assert fields["magic"] == b"KCACHE"
    assert fields["version"] == FORMAT_VERSION
    return fields, payload, metadata


# -- entries -------------------------------------------------------------------------------------


def test_the_envelope_that_the_page_shows() -> None:
    (data,) = dumps("Envelope")
    fields, payload, metadata = open_envelope(data)
    assert payload == {"ptx": b"// PTX\n", "cubin": b"\x7fELF"}
    assert metadata == {"compile_seconds": 0.25}
    assert (fields["cost"], fields["key"].hex()) == (0.25, KEY)
    assert fields["producer"] == PRODUCER
    assert f"`{PRODUCER}`" in "\n".join(section("Envelope"))
    assert encode(KEY, Entry(payload, metadata), producer=PRODUCER.encode()) == data
    assert decode(data, KEY, producer=PRODUCER.encode()).payload == payload


def test_the_bounds_that_the_page_states() -> None:
    layout, _ = tables("Envelope")
    stated = {row["field"]: row["meaning"] for row in layout}
    assert str(MAX_SECTIONS) in stated["sections"]
    assert f"{MAX_SETS} at most" in "\n".join(section("Manifests"))


@pytest.mark.usefixtures("nvrtc")
def test_a_kernel_that_the_compiler_made(tmp_path: Path) -> None:
    with KernelCache(tmp_path / "cache", backend="file") as cache:
        kernel = cache.get_or_compile(
            SOURCE,
            "scale",
            kcache.CompileOptions(arch="sm_90"),
            headers={"scale.h": "#define SCALE 2\n"},
            extra_key=b"x",
        )
    paths = list((tmp_path / "cache" / "file").glob("??/????*"))
    found = {path.name: open_envelope(path.read_bytes()) for path in paths}
    assert all(fields["key"].hex() == name for name, (fields, _, _) in found.items())
    fields, payload, metadata = found[kernel.key]
    assert payload == {"ptx": kernel.ptx, "cubin": kernel.cubin}
    assert fields["cost"] == metadata["compile_seconds"] == kernel.compile_seconds
    (names,) = tables("Kernels")
    told = {name.strip("`") for row in names for name in row["name"].split(", ")}
    assert metadata.keys() <= told
    assert told - metadata.keys() <= {"bound", "log"}  # only some kernels have these
    kinds = {"text": str, "number": (int, float), "object": dict}
    for row in names:
        if row["JSON"] in kinds and row["name"] in metadata:
            assert isinstance(metadata[row["name"]], kinds[row["JSON"]]), row


@pytest.mark.usefixtures("nvrtc")
def test_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "include"
    folder.mkdir()
    header = folder / "scale.h"
    header.write_text("#define SCALE 2\n")
    options = kcache.CompileOptions(arch="sm_90", include_paths=["include"])
    with KernelCache(tmp_path / "cache", backend="file") as cache:
        cache.get_or_compile(SOURCE, options=options)
        cache.get_or_compile(SOURCE, options=options)
    found = [open_envelope(p.read_bytes()) for p in (tmp_path / "cache" / "file").glob("??/????*")]
    (payload,) = (payload for _, payload, metadata in found if metadata == {"kind": "manifest"})
    assert dumps("Manifests") == [payload["set0"].partition(b"\0\0x0")[0]]
    layout, stamp = tables("Manifests")[0], tables("Manifests")[2]
    fields, _ = read(layout, payload["set0"])
    groups = [group.split("\0") for group in fields["groups"].split("\0\0")]
    conditions = ["c0", "within 2 0 "]
    own = ["__nv_name_map", "__nv_nvrtc_builtin_header.h"]
    *answers, (letter, location) = groups
    assert answers == [["f1", "scale.h"], ["a2", "scale.h"], ["n2", *own], conditions]
    assert (letter, len(location)) == ("x0", 64)
    assert fields["digests"] == xxhash.xxh3_128_digest(header.read_bytes())

    for name in payload.keys() - {"set0"}:
        assert name.startswith("stamps0.")
        status, rest = read(stamp, payload[name])
        expected = header.stat()
        assert status["size"] in (0, expected.st_size)
        assert status["inode"] in (0, expected.st_ino)
        (directories,) = struct.unpack_from("<I", rest)
        paths = rest[4 + directories * 40 :].split(b"\0")
        assert len(paths) == max(1, directories)


def test_the_letters_of_a_manifest_are_all_there() -> None:
    letters = {row["letter"]: row["fields"] for row in tables("Manifests")[1]}
    examples = {
        "paths": ("a",),
        "a number, a path": ("1", "a"),
        "an error's number, a path": ("13", "a"),
        "a variable": ("NAME=VALUE",),
        "a root, a path, a link": ("1", "a", "b"),
        "a mode, 1 or 0, a path": ("4", "1", "a"),
        "two numbers, a path": ("0", "1", "a"),
        "conditions": ("shown 1 /usr/include/",),
        "a location": ("0123",),
    }
    for letter, kind in letters.items():
        last = {"c": ("c0",), "x": ("x0", "0123")}
        last[letter] = (f"{letter}0", *examples[kind])
        groups = (last.pop("c"), last.pop("x"))
        text = "\0\0".join(map("\0".join, (*last.values(), *groups)))
        digest = b"d" * 16 if letter == "f" else b""
        raw = struct.pack("<I", len(text)) + text.encode() + digest
        (dependency_set,) = Manifest.from_entry(Entry({"set0": raw})).dependency_sets
        dependency_set.answers()  # raises for an unknown letter
    assert letters.keys() == set("fapdnievulmtcx")


@pytest.mark.parametrize(("value", "kind"), [(b"a" * 1000, b"z"), (b"a", b"r")])
def test_a_compressed_value(value: bytes, kind: bytes, tmp_path: Path) -> None:
    inner = FileBackend(tmp_path)
    backend = ZstdBackend(inner)
    backend.put(KEY, value)
    raw = inner.get(KEY)
    backend.close()
    assert raw is not None
    (layout,) = tables("Compressed values")
    fields, _ = read(layout, raw)
    assert (fields["magic"], fields["kind"]) == (b"KCZ", kind)
    content = fields["content"]
    assert (zstandard.decompress(content) if kind == b"z" else content) == value


# -- bundles -------------------------------------------------------------------------------------


def test_a_bundle(tmp_path: Path) -> None:
    entries = {
        bytes([n] * 32).hex(): Entry({"ptx": bytes(n)}, {"kind": "kernel"}) for n in range(9)
    }
    with KernelCache(tmp_path / "cache", backend="zstd") as cache:
        for name, entry in entries.items():
            cache.engine.put(name, entry)
        kcache.export_bundle(cache, tmp_path / "kernels.kcb")
    (rows,) = tables("Bundles")
    meaning = {row["field"]: row["meaning"] for row in rows}
    assert f"{MAX_VALUE >> 20} MiB" in meaning["entries.value"]
    with closing(sqlite3.connect(tmp_path / "kernels.kcb")) as bundle:
        (identity,) = bundle.execute("PRAGMA application_id").fetchone()
        assert identity.to_bytes(4, "big").decode() in meaning["PRAGMA application_id"]
        assert bundle.execute("PRAGMA user_version").fetchone() == (len(entries),)
        found = bundle.execute("SELECT key, value FROM entries").fetchall()
    made = [(k, encode(k, e, producer=PRODUCER.encode())) for k, e in sorted(entries.items())]
    assert found == made


# -- files beside the backends ---------------------------------------------------------------------


def test_the_journal(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), "file", clock=lambda: 1.5)
    for event in sorted(EVENTS):
        journal.note(event, KEY, "a detail")
    (table,) = tables("Journal")
    (events,) = (row["holds"] for row in table if row["field"] == "event")
    assert set(re.findall(r"`(\w+)`", f"`{events}`")) == EVENTS
    names = [row["field"] for row in table]
    for line in (tmp_path / "journal").read_text().splitlines():
        fields = dict(zip(names, line.split(" ", len(names) - 1), strict=True))
        assert fields["time"] == "1.500"
        assert fields["event"] in EVENTS
        assert (fields["key"], fields["backend"]) == (KEY[:32], "file")
        assert fields["detail"] == "a detail"
