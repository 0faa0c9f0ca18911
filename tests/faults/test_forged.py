"""Forged files: whatever follows a right checksum, a file that makes no sense counts as damaged."""

import io
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from core.helpers import QUICK, command, envelope, key, path_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kcache import CompileOptions, Entry, KernelCache, open_engine
from kcache.backend import NoBackend
from kcache.nvrtc import PRODUCER
from kcache.nvrtc.entries import DAMAGED, coldest_first, items

SOURCE = 'extern "C" __global__ void k(int* p) { *p = 1; }\n'
OPTIONS = CompileOptions(arch="sm_80")

SETTINGS = settings(
    QUICK,
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

#: JSON that kcache never writes: NaN and infinities, lone surrogates, deep nesting.
ODD_TEXT = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["\ud800", "\udfff x", "\0", "../../etc/passwd", "/dev/zero", "a" * 5000]),
)
ODD_NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([math.nan, math.inf, -math.inf, 2**63, -(2**63), 10**400, 1e308, -0.0]),
)
SCALARS = st.one_of(st.none(), st.booleans(), ODD_NUMBERS, ODD_TEXT)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ODD_TEXT, inner, max_size=4),
    max_leaves=12,
)
FIELDS_OF_KERNELS = (
    *("kind", "compile_seconds", "lowered_names", "log", "source_name", "names", "arch", "flags"),
    *("compiler", "created", "source_hash", "request", "bound", "headers", "extra_key", "nvrtc"),
)
METADATA = st.dictionaries(st.sampled_from(FIELDS_OF_KERNELS), VALUES, max_size=6)


def deep(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


OURS = PRODUCER.encode()


def dumped(metadata: object) -> bytes:
    return json.dumps(metadata).encode()


def forge(place: Path, name: str, data: bytes) -> None:
    path = place / "file" / name[:2] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o600)


NONSENSE = [
    {"kind": "kernel", "lowered_names": [1, 2]},
    {"kind": "kernel", "lowered_names": {"k": 3}},
    {"kind": "kernel", "lowered_names": "k"},
    {"kind": "kernel", "log": {"a": 1}},
    {"kind": "kernel", "compile_seconds": math.nan},
    {"kind": "kernel", "created": math.inf},
    {"kind": "kernel", "source_name": "\ud800"},
    {"kind": "kernel", "names": deep(900)},
    {"kind": "kernel", "names": deep(400)},
]


@pytest.mark.parametrize("metadata", NONSENSE, ids=range(len(NONSENSE)))
def test_forged_kernels_miss(metadata: dict[str, Any], cache: KernelCache, tmp_path: Path) -> None:
    """Such kernels once made every `get_or_compile` raise TypeError, IndexError or MemoryError."""
    name = cache._requests.make(SOURCE, (), OPTIONS).key
    forge(
        tmp_path / "cache",
        name,
        envelope(name, [(b"cubin", b"x")], dumped(metadata), producer=OURS, cost=1.0),
    )
    assert cache.lookup(SOURCE, (), OPTIONS) is None
    assert cache.stats().corrupt == 1
    assert [item.kind for item in items(cache.engine.backend)] == [DAMAGED]


@SETTINGS
@given(
    metadata=METADATA,
    sections=st.lists(
        st.tuples(
            st.sampled_from([b"ptx", b"cubin", b"ltoir", b"set0", b"stamps0.x", b"\xff", b"a"]),
            st.binary(max_size=20),
        ),
        max_size=3,
    ),
    kind=st.sampled_from(["kernel", "other", None]),
    cost=st.sampled_from([0.0, 1.0]),
)
def test_no_forged_entry_raises_anything_anywhere(
    metadata: dict[str, Any],
    sections: list[tuple[bytes, bytes]],
    kind: str | None,
    cost: float,
    cache: KernelCache,
    tmp_path: Path,
) -> None:
    metadata = metadata | ({"kind": kind} if kind else {})
    name = cache._requests.make(SOURCE, (), OPTIONS).key
    cache.clear_memory()
    forge(
        tmp_path / "cache",
        name,
        envelope(name, sections, dumped(metadata), producer=OURS, cost=cost),
    )
    found = cache.lookup(SOURCE, (), OPTIONS)
    if found is not None:
        assert all(type(v) is str for pair in found.lowered_names.items() for v in pair)
        assert type(found.log) is str
        repr(found)
    cache.why(SOURCE, (), OPTIONS)
    list(items(cache.engine.backend))


def test_forged_entries_stop_no_migration(tmp_path: Path) -> None:
    place = tmp_path / "cache"
    with KernelCache(place) as cache:
        for number in range(3):
            assert cache.engine.put(key(number), Entry({"cubin": b"x"}, {"kind": "kernel"}))
    texts = [dumped(metadata) for metadata in NONSENSE]
    texts += [b'{"kind": "kernel", "a": 1e999}', b"[]", b"{", b'{"kind": "manifest"}']
    for number, text in enumerate(texts, 100):
        forge(
            place,
            key(number),
            envelope(key(number), [(b"set0", b"\x01" * 40)], text, producer=OURS, cost=1.0),
        )
    report = f"report -o {tmp_path / 'r.html'}"
    for line in (
        "ls",
        "verify",
        report,
        f"bundle export -o {tmp_path / 'b.kcb'}",
        "migrate --to zstd",
        "stats",
    ):
        done = command(*line.split(), "--directory", place)
        assert "Traceback" not in done.stderr, (line, done.stderr)
        assert done.returncode == 0 or line == "verify", (line, done.stderr)
    with KernelCache(place, backend="zstd") as cache:
        for number in range(3):
            assert cache.engine.get(key(number)) is not None


# -- sizes, times, paths, zones --------------------------------------------------------------------


@pytest.mark.parametrize("size", [2**63, 2**64, 10**30, "99999999TiB", "9" * 99])
@pytest.mark.parametrize("name", ["file", "zstd"])
def test_caps_beyond_every_disk(name: str, size: int | str, tmp_path: Path) -> None:
    with KernelCache(tmp_path / "cache", backend=name, max_size=size) as cache:
        assert cache.engine.put(key(1), Entry({"a": b"b"}))
        assert cache.engine.max_size == 2**60
        cache.trim()
        cache.print_info(io.StringIO())
    with open_engine(tmp_path / "cache", backend=name, max_size=size) as engine:
        assert engine.get(key(1)) is None  # the entry is of another producer
        assert engine.put(key(1), Entry({"a": b"b"}))


@pytest.mark.parametrize("seconds", [2**34, -(10**9)])
def test_times_of_files_may_be_anything(seconds: int, tmp_path: Path) -> None:
    with KernelCache(tmp_path) as cache:
        assert cache.engine.put(key(1), Entry({"cubin": b"x"}, {"kind": "kernel"}))
    os.utime(path_of(tmp_path / "file", key(1)), ns=(seconds * 10**9,) * 2)
    with open_engine(tmp_path) as engine:
        assert len(list(coldest_first(engine.backend))) == 1
    report, shown = f"report -o {tmp_path.parent / 'r.html'}", f"show {key(1)[:8]}"
    trim = "trim -n --max-size 0"
    for line in ("ls", "ls --json", shown, trim, report, "migrate --to zstd"):
        done = command(*line.split(), "--directory", tmp_path)
        assert done.returncode == 0, (line, done.stderr)


def test_a_path_of_3000_levels_is_refused_in_words(tmp_path: Path) -> None:
    place = tmp_path / ("a/" * 3000)
    with KernelCache(place) as cache:
        assert isinstance(cache.engine.backend, NoBackend)
        assert "too long" in cache.engine.backend.reason
    assert os.listdir(tmp_path) == []
