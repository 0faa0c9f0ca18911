"""The chapters that compile: what they claim of the peer is so, and what they count is counted."""

from dataclasses import replace
from pathlib import Path

import pytest
from chapters import remote_gets, stampede
from chapters.damage import _facts
from contenders.contenders import DISKCACHE
from contenders.cuda_core import CoreCache
from contenders.fault_probes import MISS, run
from harness.corpus import Case, generated_source, load
from harness.findings import Absent, Findings, Ratio, Timing
from harness.main_job import Job
from harness.plan import QUICK
from remote import servers
from report import tables
from report.evidence import RESULTS, Evidence


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
    count = 2
    places = [str(tmp_path / name) for name in ("ours", "peer")]
    ours, peer = stampede._code(job, places[0]), stampede._core_code(job, places[1])
    assert stampede._start_and_wait(ours, count, tmp_path)[1] == 1
    assert stampede._start_and_wait(ours, count, tmp_path)[1] == 0
    assert 1 <= stampede._start_and_wait(peer, count, tmp_path)[1] <= count
    assert stampede._start_and_wait(peer, count, tmp_path)[1] == 0
    with pytest.raises(RuntimeError, match="a process failed"):
        stampede._start_and_wait("raise SystemExit(1)", 2, tmp_path)


# -- findings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_committed_results_file_can_be_read_and_shown(path: Path) -> None:
    read = Evidence.read([path])
    assert Findings.from_json(read.runs[0].to_json()) == read.runs[0]
    assert "### Targets" in tables.whole(read, lambda chart: chart.name)


# -- the chapter about remotes ---------------------------------------------------------------------


def test_it_compares_with_the_bare_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("redis", reason="the package redis is missing")
    servers.program("redis-server", "redis-server")
    servers.program("nginx", "nginx")
    monkeypatch.setattr(remote_gets, "LOOPS", 3)
    found = list(remote_gets.remotes(replace(QUICK, calls=2), tmp_path))
    assert not [each for each in found if isinstance(each, Absent)]
    ratios = {each.figure for each in found if isinstance(each, Ratio)}
    for name in ("Redis", "HTTP"):
        assert f"get of 100 KiB by {name}, {remote_gets.HIT}" in ratios
    rows = {each.row for each in found if isinstance(each, Timing)}
    assert rows >= {remote_gets.BARE, "unsigned", remote_gets.HIT}


def test_without_servers_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = list(remote_gets.remotes(QUICK, tmp_path))
    assert [type(each) for each in found] == [Absent, Absent]


# -- the probes of the comparison ------------------------------------------------------------------


def test_what_kcache_serves_after_damage(tmp_path: Path) -> None:
    for name in ("kcache `file`", "kcache `lmdb`"):
        for probe in ("truncated", "flipped"):
            place = tmp_path / f"{name} {probe}"
            place.mkdir()
            assert run(probe, name, place) == MISS


@pytest.mark.parametrize("probe", ["header", "full", "read_only"])
def test_kernels_survive(probe: str, tmp_path: Path, nvrtc: tuple[int, int]) -> None:
    wanted = "compiled again" if probe == "header" else "kernel returned"
    assert run(probe, "kcache `file`", tmp_path) == wanted


def test_kcache_is_one_column_and_says_which_backend_fails() -> None:
    fine = dict.fromkeys(("kcache `file`", "kcache `lmdb`"), "miss")
    (one, other) = _facts("damage", "miss", {**fine, DISKCACHE: "served"})
    assert (one.figure, one.found, one.met) == ("damage: kcache", "miss", True)
    assert (other.figure, other.found, other.met) == (f"damage: {DISKCACHE}", "served", False)
    (bad,) = _facts("damage", "miss", {**fine, "kcache `lmdb`": "served"})
    assert (bad.found, bad.met) == ("`file` miss, `lmdb` served", False)
