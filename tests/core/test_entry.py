"""Entry and its envelope: decoding returns what was encoded, or raises CorruptEntryError."""

import math
import struct
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from core import helpers
from core.helpers import QUICK, key, seal
from hypothesis import given
from hypothesis import strategies as st

from kcache import CorruptEntryError, Entry
from kcache.entry import (
    FORMAT_VERSION,
    MAX_METADATA,
    MAX_PRODUCER,
    MAX_SECTIONS,
    decode,
    encode,
)
from kcache.errors import ArgumentTypeError, IncompatibleEntryError

KEY = key(1)
OTHER = key(2)
ENTRY = Entry(
    {"ptx": b".version 8.8\0", "cubin": b"\x7fELF" + bytes(20), "empty": b""},
    {"log": "größer \u4e2d", "names": {"f<int>": "_Z1fIiEvv"}, "compile_seconds": 0.25},
)


envelope = partial(helpers.envelope, KEY)


def decodes(blob: bytes) -> bool:
    """Return whether `decode` accepts `blob`. It may raise no error but CorruptEntryError."""
    try:
        found = decode(blob, KEY)
    except CorruptEntryError:
        return False
    assert math.isfinite(found.cost)
    assert found.cost >= 0
    return True


# -- round trip --------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
NAMES = TEXT.filter(lambda text: 0 < len(text.encode()) < 256)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(TEXT, children, max_size=4),
    max_leaves=12,
)
ENTRIES = st.builds(
    Entry,
    st.dictionaries(NAMES, st.binary(max_size=200), max_size=6),
    st.dictionaries(TEXT, VALUES, max_size=5),
)
PRODUCERS = st.binary(max_size=MAX_PRODUCER)


@QUICK
@given(ENTRIES, PRODUCERS)
def test_round_trip(entry: Entry, producer: bytes) -> None:
    blob = encode(KEY, entry, producer=producer)
    found = decode(blob, KEY, producer=producer)
    assert found == entry
    assert list(found.payload) == list(entry.payload)
    assert found.cost == entry.cost
    assert encode(KEY, found, producer=producer) == blob


# -- damage ------------------------------------------------------------------------------------


def test_every_change_of_a_single_byte_is_detected() -> None:
    blob = bytearray(encode(KEY, ENTRY))
    for offset, right in enumerate(blob):
        for wrong in range(256):
            if wrong != right:
                blob[offset] = wrong
                with pytest.raises(CorruptEntryError) as caught:
                    decode(bytes(blob), KEY)
                assert not isinstance(caught.value, IncompatibleEntryError)
        blob[offset] = right
    assert decode(bytes(blob), KEY) == ENTRY


@QUICK
@given(st.binary(min_size=1, max_size=64))
def test_every_truncation_and_extension_is_detected(more: bytes) -> None:
    blob = encode(KEY, ENTRY)
    for length in range(len(blob)):
        with pytest.raises(CorruptEntryError):
            decode(blob[:length], KEY)
    for longer in (blob + more, more + blob, blob + blob, seal(blob), seal(blob[:-16] + more)):
        with pytest.raises(CorruptEntryError):
            decode(longer, KEY)


def test_an_entry_of_another_key_is_corrupt() -> None:
    with pytest.raises(CorruptEntryError, match="another key") as caught:
        decode(encode(OTHER, ENTRY), KEY)
    assert not isinstance(caught.value, IncompatibleEntryError)


@pytest.mark.parametrize("version", [0, FORMAT_VERSION + 1, 0xFFFF])
def test_another_format_version_is_incompatible_whatever_follows(version: int) -> None:
    with pytest.raises(IncompatibleEntryError, match=str(version)):
        decode(envelope(version=version), KEY)
    junk = seal(struct.pack("<6sH", b"KCACHE", version) + b"\xff" * 80)
    with pytest.raises(IncompatibleEntryError, match=str(version)):
        decode(junk, KEY)


@pytest.mark.parametrize(
    ("stored", "asked"), [(b"a/1", b"a/2"), (b"", b"a"), (b"a", b""), (b"a/1", b"a/10")]
)
def test_another_producer_is_incompatible(stored: bytes, asked: bytes) -> None:
    with pytest.raises(IncompatibleEntryError):
        decode(encode(KEY, ENTRY, producer=stored), KEY, producer=asked)


# -- forgery: a correct checksum of invalid content ----------------------------------------------

SECTIONS = [(b"ptx", b"code"), (b"cubin", b"more")]
FORGED: dict[str, bytes] = {
    "magic": envelope(magic=b"KCACHF"),
    "total too large": envelope(SECTIONS, total=1 << 63),
    "more sections than there are": envelope(SECTIONS, count=3),
    "sections beyond the bound": envelope([(b"%d" % n, b"") for n in range(MAX_SECTIONS + 1)]),
    "metadata longer than everything": envelope(metadata_length=0xFFFFFFFF),
    "metadata shorter than it is": envelope(SECTIONS, metadata_length=1),
    "producer longer than everything": envelope(producer_length=0xFFFF),
    "size beyond the end": envelope(SECTIONS, sizes=[5, 4]),
    "sizes of 2**64 - 1": envelope(SECTIONS, sizes=[(1 << 64) - 1, (1 << 64) - 1]),
    "sizes that wrap to the right sum": envelope(SECTIONS, sizes=[(1 << 64) - 1, 9]),
    "a gap after the sections": seal(envelope(SECTIONS)[:-16] + b"gap"),
    "two sections of one name": envelope([(b"ptx", b"1"), (b"ptx", b"2")]),
    "a name that is not UTF-8": envelope([(b"\xff\xfe", b"1")]),
    "metadata that is not UTF-8": envelope(metadata=b'{"a":"\xff"}'),
    "metadata that is not JSON": envelope(metadata=b"{'a': 1}"),
    "metadata that is a list": envelope(metadata=b"[]"),
    "metadata with a tail": envelope(metadata=b"{} {}"),
    "lists nested 100,000 deep": envelope(metadata=b'{"a":' + b"[" * 100_000),
    "objects nested 100,000 deep": envelope(metadata=b'{"a":' * 100_000),
    "cost not a number": envelope(cost=math.nan),
    "negative cost": envelope(cost=-1.0),
}


@pytest.mark.parametrize("blob", FORGED.values(), ids=FORGED.keys())
def test_a_forged_field_is_corrupt_and_costs_no_more_than_its_length(blob: bytes) -> None:
    # Metadata is copied, decoded to text and parsed: a pointer and a list per bracket at worst.
    assert peak_of(lambda: decodes(blob)) < 64 * 1024 + 80 * len(blob)
    assert not decodes(blob)


def peak_of(work: Callable[[], object]) -> int:
    """Return the peak of allocated bytes during `work`."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# -- Entry -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "metadata"),
    [([("ptx", b"")], {}), (None, {}), ({1: b""}, {}), ({"ptx": "text"}, {}), ({}, [("a", 1)])],
)
def test_wrong_types_are_refused_when_an_entry_is_made(payload: Any, metadata: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"payload|metadata"):
        Entry(payload, metadata)


def _endless() -> dict[str, Any]:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    return loop


UNFIT: dict[str, tuple[dict[str, bytes], dict[str, Any]]] = {
    "bytes in metadata": ({}, {"x": b"bytes"}),
    "not a number": ({}, {"x": math.nan}),
    "half a surrogate pair": ({}, {"x": "\ud800"}),
    "an integer of 5,000 digits": ({}, {"x": 10**5000}),
    "a compile time of 5,000 digits": ({}, {"compile_seconds": 10**5000}),
    "metadata that holds itself": ({}, _endless()),
    "metadata beyond the bound": ({}, {"log": "x" * MAX_METADATA}),
    "an empty section name": ({"": b""}, {}),
    "a section name of 128 letters and 256 bytes": ({"ä" * 128: b""}, {}),
    "a section name that is not Unicode": ({"\ud800": b""}, {}),
    "a section too many": ({str(n): b"" for n in range(MAX_SECTIONS + 1)}, {}),
}


@pytest.mark.parametrize("what", UNFIT)
def test_unencodable_entries_are_refused(what: str) -> None:
    entry = Entry(*UNFIT[what])
    with pytest.raises(ArgumentTypeError):
        encode(KEY, entry)


def test_an_entry_is_immutable() -> None:
    for found in (ENTRY, decode(encode(KEY, ENTRY), KEY)):
        for name in ("payload", "metadata", "cost", "view"):
            with pytest.raises(AttributeError):
                setattr(found, name, None)
        with pytest.raises(TypeError):
            found.payload["ptx"] = b""  # type: ignore[index]
        with pytest.raises(TypeError):
            found.metadata["log"] = ""  # type: ignore[index]
    assert decode(encode(KEY, ENTRY), KEY) == ENTRY
