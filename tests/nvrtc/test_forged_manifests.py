"""Forged manifests: a right checksum with other bytes inside.

A manifest lists the headers to compare, and its bytes may be anything. Whatever they are, a request
ends with the kernel that the current headers give, or with the compiler's own error.
"""

import os
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

#: Bytes that are spliced into a header set: heads of groups with invalid roots, paths, separators.
PIECES = [
    *(b"", b"\0", b"\0\0", b"\xff" * 16, bytes(16), b"\xff\xff\xff\xff", b"a" * 5000, b"a/" * 900),
    *(b"f-9\0/dev/zero\0\0", b"f0\0../outer.h\0\0", b"a65536\0x\0\0", b"ex\0" + b"9" * 40, b"z1\0"),
    *(
        b"n1e3\0\xd9\xa3\0\0",
        b"i-1\0KCACHE_DIR=/tmp\0\0",
        b"c0\0\0",
        b"x7\0\xff",
        b"/proc/self/mem",
    ),
]
#: Edits: the offset, the number of bytes that are removed, and the bytes that are inserted.
EDITS = st.tuples(st.integers(0, 400), st.integers(0, 20), st.sampled_from(PIECES))


def edited(raw: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    changed = bytearray(raw)
    for at, count, new in edits:
        start = at % (len(changed) + 1)
        changed[start : start + count] = new
    return bytes(changed)


class Cached(NamedTuple):
    """A kernel in a cache, and the sections of its manifest."""

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
        st.lists(EDITS, max_size=4),
        st.lists(EDITS, max_size=1),
        st.sampled_from(["", "set1", "set00", "set-1", "set" + "9" * 30, "stamps1.", "x"]),
    )
    def check(edits: Any, stamps: Any, name: str) -> None:
        sections = [
            (b"set0", edited(raw, edits)),
            (stamped.encode(), edited(remembered, stamps)),
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
def test_special_files_are_not_read_as_headers(
    cached: Cached, path: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some special files have no end, some block for ever, and opening some has side effects."""
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
