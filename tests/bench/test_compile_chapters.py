"""The chapters that compile: what they claim of the peer is so, and what they count is counted."""

from __future__ import annotations

from pathlib import Path

import pytest
from chapters import stampede
from contenders.cuda_core import CoreCache
from harness.corpus import Case, generated_source, load
from harness.main_job import Job


@pytest.fixture
def core(nvrtc: tuple[int, int]) -> object:
    return pytest.importorskip("cuda.core.utils", reason="cuda-core is missing")


def with_header(folder: Path) -> Case:
    folder.mkdir()
    (folder / "one.h").write_text("#define ONE 1\n", encoding="utf-8")
    source = '#include "one.h"\ntemplate <int N> __global__ void k(int* x) { *x = N + ONE; }\n'
    return Case("one", source, ("k<2>",), (folder,))


def test_the_peer_refuses_what_it_is_said_to_refuse(core: object, tmp_path: Path) -> None:
    from cuda.core import Program, ProgramOptions

    case = with_header(tmp_path / "include")
    options = ProgramOptions(arch=case.arch, include_path=str(case.include_dirs[0]))
    program = Program(case.source, "c++", options)
    cache = CoreCache(load("trivial"), tmp_path).memory_cache
    with pytest.raises(ValueError, match="extra_digest"):
        program.compile("cubin", cache=cache)
    with pytest.raises(ValueError, match="name_expressions"):
        program.compile("cubin", case.names, cache=cache)


def test_compiles_of_a_stampede_are_counted(core: object, tmp_path: Path) -> None:
    job = Job(generated_source(2048), tmp_path)
    count = 3
    places = [str(tmp_path / name) for name in ("ours", "peer")]
    ours, peer = stampede._code(job, places[0]), stampede._core_code(job, places[1])
    assert stampede._start_and_wait(ours, count, tmp_path)[1] == 1
    assert stampede._start_and_wait(ours, count, tmp_path)[1] == 0
    assert 1 <= stampede._start_and_wait(peer, count, tmp_path)[1] <= count
    assert stampede._start_and_wait(peer, count, tmp_path)[1] == 0
    with pytest.raises(RuntimeError, match="a process failed"):
        stampede._start_and_wait("raise SystemExit(1)", 2, tmp_path)
