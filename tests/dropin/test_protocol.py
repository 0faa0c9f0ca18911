"""Frames and what is in them: what is packed is unpacked, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcache.dropin import known, protocol
from kcache.dropin.answering import Answering, Declined, standing
from kcache.dropin.counts import Counts, summary
from kcache.dropin.protocol import Answer, Program, ProtocolError

TEXT = st.binary(max_size=40).filter(lambda data: b"\0" not in data)
TEXTS = st.lists(TEXT, max_size=4)
NUMBER = st.integers(0, 2**32 - 1)
PROGRAMS = st.builds(
    Program,
    NUMBER,
    TEXT,
    TEXT,
    TEXT,
    st.dictionaries(TEXT, TEXT, max_size=3),
    TEXT,
    TEXT,
    st.lists(st.tuples(TEXT, TEXT), max_size=3),
    TEXTS,
    TEXTS,
)
ANSWERS = st.builds(
    Answer,
    NUMBER,
    TEXT,
    TEXT,
    TEXT,
    TEXT,
    st.lists(st.tuples(TEXT, TEXT), max_size=3),
    st.booleans(),
    st.booleans(),
    st.just(0.0),
)


@given(PROGRAMS)
def test_programs(program: Program) -> None:
    assert protocol.unpack_program(protocol.pack_program(program)) == program


@given(ANSWERS)
def test_answers(answer: Answer) -> None:
    assert protocol.unpack_answer(protocol.pack_answer(answer)) == answer


@given(st.tuples(NUMBER, NUMBER), st.lists(NUMBER, max_size=5))
def test_infos(version: tuple[int, int], archs: list[int]) -> None:
    assert protocol.unpack_info(protocol.pack_info(version, archs)) == (version, archs)


@given(PROGRAMS, st.data())
def test_a_program_that_is_cut_off_or_extended(program: Program, data: st.DataObject) -> None:
    packed = protocol.pack_program(program)
    cut = packed[: data.draw(st.integers(0, len(packed) - 1))]
    for damaged in (cut, packed + b"x"):
        with pytest.raises(ProtocolError):
            protocol.unpack_program(damaged)


@given(st.binary(max_size=200))
def test_nonsense_is_refused_or_read_and_nothing_else(payload: bytes) -> None:
    for unpack in (
        protocol.unpack_program,
        protocol.unpack_answer,
        protocol.unpack_info,
        protocol.unpack_query,
    ):
        try:
            unpack(payload)
        except ProtocolError:
            pass


def test_a_list_that_claims_to_be_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError, match="list is cut off"):
        protocol.unpack_info(b"\0" * 8 + b"\xff" * 4)


def test_frames() -> None:
    whole = protocol.frame(protocol.NOTE, b"why")
    assert protocol.unpack_head(whole) == (protocol.NOTE, 3)
    for damaged in (b"KDI2" + whole[4:], whole[:4] + b"\7" + whole[5:]):
        with pytest.raises(ProtocolError):
            protocol.unpack_head(damaged)
    huge = whole[:8] + (protocol.MAX_FRAME + 1).to_bytes(4, "little") + whole[12:]
    with pytest.raises(ProtocolError, match="too large"):
        protocol.unpack_head(huge)


def test_counts_are_told_in_a_line() -> None:
    counts = Counts()
    counts.answered(hit=True, failed=False, saved=1.25)
    counts.answered(hit=False, failed=False)
    counts.answered(hit=False, failed=True)
    counts.handed("pch")
    assert summary(counts.as_dict()) == (
        "hits 1; misses 1; refused sources 1; left to NVRTC 1 (pch: 1); saved 1.2 s; "
        "programs: none used NVRTC"
    )


def test_what_is_known_of_a_build_is_remembered(tmp_path: Path) -> None:
    folder = str(tmp_path / "new")
    about = ((13, 5), (75, 90))
    assert known.recall(folder, "one") is None
    known.remember(folder, "one", about)
    assert known.recall(folder, "one") == about
    assert known.recall(folder, "two") is None
    assert known.recall(None, "one") is None
    (file,) = Path(folder).iterdir()
    for nonsense in ("", "{}", "[13]", '["13", 5, 75]', "[true, 5, 75]", str([13] * 99)):
        file.write_text(nonsense)
        assert known.recall(folder, "one") is None


def test_a_source_that_is_alone_in_its_directory(tmp_path: Path) -> None:
    from kcache.dropin.answering import _is_alone

    program = PROGRAM._replace(name=os.fsencode(tmp_path / "k.cu"))
    assert _is_alone(program)
    assert not _is_alone(program._replace(name=b"k.cu"))
    assert _is_alone(program._replace(name=os.fsencode(tmp_path / "gone/k.cu")))
    (tmp_path / "k.cu").touch()
    assert _is_alone(program)
    (tmp_path / "x.h").touch()
    assert not _is_alone(program)


# -- what is declined ------------------------------------------------------------------------------


class Cache:
    """A cache that is not asked."""

    def _get_or_compile_for(self, *_args: object, **_kwargs: object) -> None:
        raise AssertionError("asked")

    def close(self) -> None:
        pass


PROGRAM = Program(
    13, b"/nowhere", b"/", standing(), {}, b"__global__ void k() {}", b"k.cu", [], [], []
)


def test_an_nvrtc_that_was_replaced_is_not_answered_for(real: Path, tmp_path: Path) -> None:
    copy = tmp_path / real.name
    copy.symlink_to(real)
    cache: Any = Cache()
    answering = Answering(cache)
    major = int(real.name.rpartition(".")[2])
    program = PROGRAM._replace(library=os.fsencode(copy), major=major)
    assert answering.answer(program) == Declined("AssertionError: asked")
    copy.unlink()
    copy.write_bytes(b"another one")
    assert answering.answer(program) == Declined("NVRTC was replaced")


@pytest.mark.parametrize(
    "options",
    [
        [b"-I/opt/research"],
        [b"-I", b"/a/link/keep/bundled/pch/time-trace"],
        [b"-DX=pch", b"\t-lineinfo"],
        [b"--include-path", b"pch/options-file"],
    ],
)
def test_a_word_in_a_path_is_no_option(real: Path, options: list[bytes]) -> None:
    cache: Any = Cache()
    major = int(real.name.rpartition(".")[2])
    program = PROGRAM._replace(library=os.fsencode(real), major=major, options=options)
    assert Answering(cache).answer(program) == Declined("AssertionError: asked")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"options": [b"--ptxas-options=-optf=x"]}, "option --ptxas-options"),
        ({"options": [b"-\xff"]}, "not UTF-8"),
        ({"options": [b"-I/proc"]}, "a path in /proc"),
        ({"headers": [(b"a", b'#include "/dev/stdin"')]}, "a path in /proc"),
        ({"options": [b"-I/process", b"-I/dev/shm", b"-I/proc.d"]}, "FileNotFoundError"),
        ({"headers": [(b"a", b"1"), (b"a", b"2")]}, "two headers of one name"),
        ({}, "FileNotFoundError"),
    ],
)
def test_what_can_not_be_answered_exactly_is_declined(change: dict[str, Any], reason: str) -> None:
    cache: Any = Cache()
    answer = Answering(cache).answer(PROGRAM._replace(**change))
    assert isinstance(answer, Declined)
    assert answer.reason.startswith(reason)
