"""Manifests with a right checksum whose fields are changed by their own grammar.

A manifest says which headers to compare, and is only as good as the bytes that it was read from. So
whatever it says, a request ends with a kernel of what the headers are now, or with the compiler's
own error.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from core.helpers import QUICK, envelope
from faults.test_forged import forge
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kcache import CompileOptions, KernelCache
from kcache.entry import decode
from kcache.nvrtc import PRODUCER
from kcache.nvrtc.files import SIZE
from kcache.nvrtc.search import ABSOLUTE

pytestmark = pytest.mark.usefixtures("nvrtc")

SOURCE = """\
#include "outer.h"
#if __has_include("absent.h")
#error "nothing put it there"
#endif
extern "C" __global__ void k(int* p) { *p = VALUE; }
"""
SETTINGS = settings(QUICK, suppress_health_check=[HealthCheck.too_slow])

KINDS = "fapdnieovcxz\0"
ROOTS = ["-9", "-3", "-2", "-1", "0", "1", "7", "65536", "9" * 30, "", "x", "\u0663", "1e3", " 1"]
FIELDS = st.one_of(
    st.sampled_from(
        [
            *("outer.h", "inner.h", "../outer.h", "", ".", "..", "/", "//", "a" * 5000, "a/" * 900),
            *("/dev/zero", "/dev/null/x", "/proc/self/mem", "/proc/self/fd/0", "\udcff", "\u00e9"),
            *("=x", "/x", "~x", "!", "!0n", "+", "-", "n", "stat", "access", "list", "cwd", "link"),
            *("-1", "2", "9" * 40, "00", "zz", "KCACHE_DIR=/tmp", "PATH", "A=B=C"),
        ]
    ),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8),
)


#: What a text is made of: heads of groups, their fields, and what separates both.
PIECES = st.one_of(
    st.builds("{}{}".format, st.sampled_from(KINDS), st.sampled_from(ROOTS)),
    FIELDS,
    st.sampled_from(["\0", "\0\0"]),
)
#: Where, how many pieces go, and which come.
EDITS = st.tuples(st.integers(0, 60), st.integers(0, 4), st.lists(PIECES, max_size=3))
#: How a set's binary part, or its stamps, become longer, shorter or other.
BYTES = st.sampled_from(["as it is", "empty", "shorter", "longer", "ones", "counts", "zeros"])


def changed_bytes(data: bytes, how: str) -> bytes:
    others = {
        "empty": b"",
        "shorter": data[:-1],
        "longer": data + b"\0" * 16,
        "ones": b"\xff" * len(data),
        "zeros": bytes(len(data)),
        "counts": data[:-4] + struct.pack("<I", 2**32 - 1),
    }
    return others.get(how, data)


def changed_set(raw: bytes, edits: list[tuple[int, int, list[str]]], digests: str) -> bytes:
    (length,) = struct.unpack_from("<I", raw)
    pieces = re.split("(\0+)", raw[4 : 4 + length].decode("utf-8", "surrogateescape"))
    for at, count, new in edits:
        start = at % (len(pieces) + 1)
        pieces[start : start + count] = new
    text = "".join(pieces).encode("utf-8", "surrogateescape")
    return struct.pack("<I", len(text)) + text + changed_bytes(raw[4 + length :], digests)


class Cached(NamedTuple):
    """A kernel in a cache, and the manifest that leads to it."""

    cache: KernelCache
    place: Path
    options: CompileOptions
    key: str
    sections: dict[str, bytes]
    ptx: bytes


@pytest.fixture
def cached(tmp_path: Path) -> Iterator[Cached]:
    (tmp_path / "outer.h").write_text('#include "inner.h"\n')
    (tmp_path / "inner.h").write_text("#define VALUE 7\n")
    options = CompileOptions(arch="sm_80", include_paths=(str(tmp_path),))
    with KernelCache(tmp_path / "cache", backend="file") as cache:
        kernel = cache.get_or_compile(SOURCE, (), options)
        assert kernel.ptx is not None
        key = cache._requests.make(SOURCE, (), options).key
        raw = cache.engine.backend.get(key)
        assert raw is not None
        entry = decode(raw, key, producer=PRODUCER.encode())
        sections = {name: bytes(value) for name, value in entry.payload.items()}
        yield Cached(cache, tmp_path / "cache", options, key, sections, kernel.ptx)


def ends_right(cached: Cached, sections: list[tuple[bytes, bytes]]) -> None:
    cache = cached.cache
    cache.clear_memory()
    metadata = b'{"kind":"manifest"}'
    data = envelope(cached.key, sections, metadata, producer=PRODUCER.encode())
    forge(cached.place, cached.key, data)
    found = cache.lookup(SOURCE, (), cached.options)
    assert found is None or found.ptx == cached.ptx
    cache.why(SOURCE, (), cached.options)
    assert cache.get_or_compile(SOURCE, (), cached.options).ptx == cached.ptx
    again = cache.lookup(SOURCE, (), cached.options)
    assert again is not None
    assert again.ptx == cached.ptx


@pytest.mark.timeout(3600)
def test_no_changed_manifest_gives_another_kernel_or_an_error(cached: Cached, long: bool) -> None:
    raw = cached.sections.pop("set0")
    ((stamped, remembered),) = cached.sections.items()

    @settings(SETTINGS, max_examples=3000 if long else 15)
    @given(
        edits=st.lists(EDITS, min_size=1, max_size=4),
        digests=BYTES,
        stamps=BYTES,
        name=st.sampled_from(["", "", "set1", "set00", "set-1", "set" + "9" * 30, "stamps1.", "x"]),
    )
    def check(edits: Any, digests: str, stamps: str, name: str) -> None:
        sections = [
            (b"set0", changed_set(raw, edits, digests)),
            (stamped.encode(), changed_bytes(remembered, stamps)),
            *([(name.encode(), raw)] if name else []),
        ]
        ends_right(cached, sections)

    check()


@pytest.mark.parametrize("kind", ["f", "e"])
@pytest.mark.parametrize(
    "path",
    [
        *("/dev/zero", "/dev/watchdog", "/proc/kcore", "/proc/self/mem", "pipe", "sparse"),
    ],
)
def test_what_is_no_header_is_not_read(
    cached: Cached, path: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of these have no end, some wait for ever, and some do something when they are opened."""
    if path == "pipe":
        path = str(cached.place / "pipe")
        os.mkfifo(path)
    elif path == "sparse":
        path = str(cached.place / "sparse")
        Path(path).touch()
        os.truncate(path, 1 << 42)
    raw = cached.sections["set0"]
    (length,) = struct.unpack_from("<I", raw)
    group = {
        "f": f"f{ABSOLUTE}\0{path}",
        "e": f"e{ABSOLUTE}\0{13}\0{path}",
    }[kind]
    text = group.encode() + b"\0\0" + raw[4 : 4 + length]
    digests = bytes(SIZE) * (kind == "f") + raw[4 + length :]
    forged = struct.pack("<I", len(text)) + text + digests
    opened: list[object] = []
    real = os.open

    def open_(path: str, *more: int, **named: int) -> int:
        opened.append(path)
        return real(path, *more, **named)

    monkeypatch.setattr(os, "open", open_)
    ends_right(cached, [(b"set0", forged)])
    assert path not in opened or (kind == "e" and Path(path).is_file())
