"""The page about formats says what the bytes are: its tables read what the code writes."""

from __future__ import annotations

import json
import re
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

import pytest
import xxhash
import zstandard
from docs.tables import dumps, read, section, tables

import kcache
from kcache import Entry, KernelCache
from kcache.engine.journal import EVENTS, Journal
from kcache.entry import FORMAT_VERSION, MAX_SECTIONS, decode, encode
from kcache.nvrtc import PRODUCER
from kcache.nvrtc.manifest import MAX_SETS, Manifest
from kcache.remote.bundle import MAX_VALUE
from kcache_backends.file import FileBackend
from kcache_backends.zstd import ZstdBackend

KEY = bytes(range(32)).hex()
SOURCE = '#include "scale.h"\n__global__ void scale(float* x) { *x *= SCALE; }\n'


def open_envelope(data: bytes) -> tuple[dict, dict[str, bytes], dict]:
    """Returns the fields, the payload and the metadata of an envelope, by the page alone."""
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
    assert told - metadata.keys() <= {
        "bound",
        "proof",
    }  # of outcomes that hold paths, or are proven
    kinds = {"text": str, "number": (int, float), "object": dict}
    for row in names:
        if row["JSON"] in kinds and row["name"] in metadata:
            assert isinstance(metadata[row["name"]], kinds[row["JSON"]]), row


@pytest.mark.usefixtures("nvrtc")
def test_the_manifest_that_the_compiler_made(tmp_path: Path) -> None:
    folder = tmp_path / "include"
    folder.mkdir()
    header = folder / "scale.h"
    header.write_text("#define SCALE 2\n")
    options = kcache.CompileOptions(arch="sm_90", include_paths=[folder])
    with KernelCache(tmp_path / "cache", backend="file") as cache:
        cache.get_or_compile(SOURCE, options=options)
        cache.get_or_compile(SOURCE, options=options)
    found = [open_envelope(p.read_bytes()) for p in (tmp_path / "cache" / "file").glob("??/????*")]
    (payload,) = (payload for _, payload, metadata in found if metadata == {"kind": "manifest"})
    assert dumps("Manifests") == [payload["set0"].partition(b"\0\0x0")[0]]
    layout, stamp = tables("Manifests")[0], tables("Manifests")[2]
    fields, _ = read(layout, payload["set0"])
    groups = [group.split("\0") for group in fields["groups"].split("\0\0")]
    own = ["__nv_name_map", "__nv_nvrtc_builtin_header.h"]
    *answers, (letter, location) = groups
    assert answers == [["f1", "scale.h"], ["a2", "scale.h"], ["n2", *own], ["c0"]]
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
        "what the result shows of its place": ("name=k.cu",),
        "a location, what a proof came to, a digest": ("0123", "+", "4567"),
    }
    for letter, kind in letters.items():
        last = {"c": ("c0",), "x": ("x0", "0123")}
        last[letter] = (f"{letter}0", *examples[kind])
        groups = (last.pop("c"), last.pop("x"))
        text = "\0\0".join(map("\0".join, (*last.values(), *groups)))
        digest = b"d" * 16 if letter == "f" else b""
        raw = struct.pack("<I", len(text)) + text.encode() + digest
        (header_set,) = Manifest.from_entry(Entry({"set0": raw})).header_sets
        header_set.sections()  # raises for a letter that is none
    assert letters.keys() == set("fapdnievcx")


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
