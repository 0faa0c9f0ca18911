"""The messages between the interface library and the service, and requests that are declined."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcache.config import Config
from kcache.dropin.compile_service import Counts, summary
from kcache.dropin.nvrtc_handler import NvrtcHandler, recall, remember
from kcache.dropin.protocol import DeclinedError, Program, standing, unpack_program
from kcache.util.wire import WireError


@given(st.lists(st.integers(0, 4), min_size=4, max_size=4), st.integers(-3, 3))
def test_the_field_counts_of_a_program_are_checked(counts: list[int], more: int) -> None:
    variables, headers, options, expressions = counts
    size = 10 + variables + 2 * headers + options + expressions
    texts = [b"%d=" % number for number in range(size - 5 + more)]
    fields = [b"13", *(b"%d" % count for count in counts), *texts]
    if more:
        with pytest.raises(WireError):
            unpack_program(fields)
        return
    program = unpack_program(fields)
    assert (program.major, program.library, program.standing) == (13, b"0=", texts[-1])
    told = [program.environment, program.headers, program.options, program.expressions]
    assert list(map(len, told)) == counts


@given(st.lists(st.binary(max_size=20), max_size=20))
def test_nonsense_is_refused_or_read_and_nothing_else(fields: list[bytes]) -> None:
    try:
        unpack_program(fields)
    except WireError:
        pass


def test_counts_are_summarized_in_one_line() -> None:
    counts = Counts()
    counts.answered(hit=True, failed=False)
    counts.answered(hit=False, failed=False)
    counts.answered(hit=False, failed=True)
    counts.handed("pch")
    assert summary({**counts.as_dict(), "saved_seconds": 1.25}) == (
        "hits 1; misses 1; compile errors 1; uncacheable 1 (pch: 1); saved 1.2 s; "
        "programs: none used NVRTC or nvcc"
    )


def test_the_version_of_a_build_is_remembered(tmp_path: Path) -> None:
    folder = str(tmp_path / "new")
    about = ((13, 5), (75, 90))
    assert recall(folder, "one") is None
    remember(folder, "one", about)
    assert recall(folder, "one") == about
    assert recall(folder, "two") is None
    assert recall(None, "one") is None
    (file,) = Path(folder).iterdir()
    for nonsense in ("", "{}", "13 5", "[13, 5, 75]", "true 5 75", "13 " * 99):
        file.write_text(nonsense)
        assert recall(folder, "one") is None


# -- requests that are declined --------------------------------------------------------------------


class Cache:
    """A cache that must not be used."""

    config = Config.load(environ={})

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
    handler = NvrtcHandler(cache)
    major = int(real.name.rpartition(".")[2])
    program = PROGRAM._replace(library=os.fsencode(copy), major=major)
    with pytest.raises(DeclinedError, match="^AssertionError: asked$"):
        handler.answer(program)
    copy.unlink()
    copy.write_bytes(b"another one")
    with pytest.raises(DeclinedError, match="^NVRTC was replaced after its first use$"):
        handler.answer(program)
