"""The chapters that compile: what they claim of the peer is so, and what they count is counted."""

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path

import pytest
from chapters import fresh_process, header_count, stampede, warm_up
from contenders.cuda_core import DIGEST, CoreCache
from harness import miss_stopwatch
from harness.corpus import Case, generated_source, load
from harness.findings import Absent, Point, Ratio
from harness.main_job import Job
from harness.measure import PRINT_PEAK, run_python
from harness.plan import Plan

FEW = Plan(processes=3, calls=3, compiles=3, costly=3, splits=0)


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


def test_the_peer_is_given_the_same_kernel_and_hits(core: object, tmp_path: Path) -> None:
    case = with_header(tmp_path / "include")
    peer, job = CoreCache(case, tmp_path), Job(case, tmp_path)
    assert set(peer.cold()) == {"peer cold"}
    code, held = peer.request(peer.disk_cache)
    assert held
    assert peer.request(peer.memory_cache) == (code, True)
    with job.memory_cache as cache:
        name = job.hit(cache).lowered_names["k<2>"]
    assert name.encode() in code
    assert peer.fresh_process()["peer peak"] > job.fresh_process()["peak"]
    # The digest is a constant: a changed header is not seen, which the tables say.
    (case.include_dirs[0] / "one.h").write_text("#define ONE 7\n", encoding="utf-8")
    assert peer.request(peer.disk_cache) == (code, True)
    assert DIGEST == b"headers"
    # An empty cache misses, and so does a hit that finds one.
    with pytest.raises(RuntimeError, match="failed"):
        run_python(peer.hit_code.replace(peer.directory, str(tmp_path / "empty")), tmp_path)


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


def test_the_chapter_about_headers_has_a_point_for_each(core: object, tmp_path: Path) -> None:
    found = list(header_count.headers(FEW, tmp_path))
    assert not [each for each in found if isinstance(each, Absent)]
    points = [each for each in found if isinstance(each, Point)]
    assert {(each.series, each.role) for each in points} == {
        ("kcache `file`", "ours"),
        ("kcache memory", "ours"),
        ("cuda.core FileStream", "peer"),
        ("cuda.core InMemory", "peer"),
        ("os.stat", "floor"),
    }
    for series in {each.series for each in points}:
        assert [each.x for each in points if each.series == series] == [1, 10, 100, 1_000]
    assert all(each.y.median > 0 and each.y.count == FEW.calls for each in points)
    assert len([each for each in found if isinstance(each, Ratio)]) == 2


def test_a_peak_is_that_of_the_process_itself(tmp_path: Path) -> None:
    """Not of the one that started it, which is what `resource` would say."""
    held = b"x" * (150 << 20)  # zeros would take no memory until they are read
    small = int(run_python(PRINT_PEAK, tmp_path).output)
    large = int(run_python('kept = b"x" * (60 << 20)' + PRINT_PEAK, tmp_path).output)
    assert 1 << 20 < small < 100 << 20 < len(held)
    assert abs(large - small - (60 << 20)) < 10 << 20


def test_the_stopwatch_knows_every_part_of_a_miss(tmp_path: Path, nvrtc: tuple[int, int]) -> None:
    """A function that was renamed would be charged to another part, with a line on stderr only."""
    case = with_header(tmp_path / "include")
    with miss_stopwatch.Stopwatch() as watch:
        Job(case, tmp_path).miss()
    for names in miss_stopwatch.PARTS.values():
        for name in names:
            module, _, path = name.partition(":")
            functools.reduce(getattr, path.split("."), importlib.import_module(module))
    seldom = {"starting a worker"}
    assert watch.seconds.keys() >= {*miss_stopwatch.PARTS, miss_stopwatch.REST} - seldom
    assert watch.seconds[miss_stopwatch.COMPILING] > 0


def test_a_miss_is_no_first_one_and_tells_the_compile(
    tmp_path: Path, nvrtc: tuple[int, int]
) -> None:
    found = Job(with_header(tmp_path / "include"), tmp_path).miss()
    assert found.keys() == {"miss", "inside"}
    assert 0 < found["inside"] < found["miss"]


def test_processes_that_miss_and_bare_ones_do_the_same(
    tmp_path: Path, nvrtc: tuple[int, int]
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="the bindings are missing")
    case = generated_source(2048)
    given = {"arch": case.arch, "std": case.std, "source": case.source, "names": case.names}
    for _ in range(2):  # each in a cache of its own
        run_python(fresh_process._MISS.format(directory=str(tmp_path / "miss-"), **given), tmp_path)
    run_python(fresh_process._BINDINGS.format(**given), tmp_path)
    assert len(list(tmp_path.glob("miss-*"))) == 2
    broken = given | {"source": "oops"}
    with pytest.raises(RuntimeError, match="failed"):
        run_python(fresh_process._BINDINGS.format(**broken), tmp_path)


def test_a_list_is_warmed_once(tmp_path: Path, nvrtc: tuple[int, int]) -> None:
    case = with_header(tmp_path / "include")
    path = tmp_path / "kernels.json"
    listed = warm_up.kernel_list([load("trivial")], (case.arch,))
    path.write_text(json.dumps(listed), encoding="utf-8")
    for jobs, compiled in ((2, 1), (None, 0)):
        _, _, made = warm_up.run_warm(path, str(tmp_path / "cache"), jobs)
        assert (made["compiled"], made["failed"]) == (compiled, 0)
