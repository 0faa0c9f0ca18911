"""`ProgramCache` and `compile`, which integrate kcache into cuda.core."""

import json
import os
import shutil
from pathlib import Path

import pytest
from core.helpers import python
from nvrtc.reference import write

import kcache

core = pytest.importorskip("cuda.core")
pytestmark = pytest.mark.usefixtures("nvrtc")

from kcache.cli.app import app  # noqa: E402
from kcache.integrations.cuda_core import ProgramCache, compile  # noqa: E402

SOURCE = 'extern "C" __global__ void k(float* x) { x[0] = 1; }'
TEMPLATE = '#include "scale.h"\ntemplate <class T> __global__ void t(T* x) { *x *= SCALE; }'


@pytest.fixture
def programs(tmp_path: Path):
    with ProgramCache(tmp_path / "programs") as made:
        yield made


def _stored(folder: Path) -> list[Path]:
    return [path for path in folder.glob("file/*/*") if len(path.name) == 64]


def test_a_second_process_hits(tmp_path: Path) -> None:
    program = core.Program(SOURCE, "c++", core.ProgramOptions(arch="sm_90"))
    plain = program.compile("cubin")
    with ProgramCache(tmp_path / "programs") as first:
        made = program.compile("cubin", cache=first)
    with ProgramCache(tmp_path / "programs") as second:
        found = program.compile("cubin", cache=second)
        assert bytes(found.code) == bytes(made.code) == bytes(plain.code)
    with kcache.open_engine(tmp_path / "programs") as engine:
        total = engine.total_stats()
    assert (total.hits, total.misses, total.compiles) == (1, 1, 1)
    assert total.saved_seconds == total.compile_seconds > 0


def test_it_shares_the_directory_with_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvrtc: tuple[int, int]
) -> None:
    monkeypatch.setenv("KCACHE_DIR", str(tmp_path / "shared"))
    options = kcache.CompileOptions(arch="sm_90")
    with kcache.KernelCache() as kernels, ProgramCache() as programs:
        kernels.get_or_compile(SOURCE, (), options)
        programs[b"a"] = b"1"
        programs["b"] = bytearray(b"2")
        assert (len(programs), kernels.entry_count) == (2, 3)
        assert kernels.stats().stale == 0
        programs.clear()
        assert (len(programs), kernels.entry_count) == (0, 1)
        assert programs.get(b"a") is None


def test_every_command_knows_its_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str | Path) -> str:
        assert app.run([*map(str, arguments)]) == 0
        return capfd.readouterr().out

    def compile_one(place: str) -> int:
        monkeypatch.setenv("KCACHE_DIR", str(tmp_path / place))
        with ProgramCache() as programs:
            core.Program(SOURCE, "c++", options).compile("cubin", cache=programs)
            return programs._entries.engine.stats().hits

    options = core.ProgramOptions(arch="sm_90a", name="scale.cu")
    assert compile_one("cache") == 0
    (item,) = json.loads(run("ls", "--json"))
    assert (item["kind"], item["source_name"], item["names"]) == ("kernel", "scale.cu", ["k"])
    assert (item["arch"], item["problem"]) == ("sm_90a", None)
    assert item["created"] > 0
    assert "1 sound" in run("verify")
    for backend in ("zstd", "lmdb", "file"):
        assert run("migrate", "--to", backend).startswith("moved 1 entry")
    run("bundle", "export", "-o", tmp_path / "all.kcb")
    monkeypatch.setenv("KCACHE_DIR", str(tmp_path / "other"))
    run("bundle", "import", tmp_path / "all.kcb")
    assert compile_one("other") == 1
    run("extract", item["key"], "-o", tmp_path / "k.cubin")
    assert (tmp_path / "k.cubin").read_bytes().startswith(b"\x7fELF")


@pytest.mark.parametrize("harm", ["truncated", "removed", "closed", "replaced by a file"])
def test_failures_raise_nothing(harm: str, tmp_path: Path, programs: ProgramCache) -> None:
    folder = tmp_path / "programs"
    with ProgramCache(folder) as other:
        other[b"k"] = b"code" * 100
    if harm == "truncated":
        (path,) = _stored(folder)
        os.truncate(path, 100)
    elif harm == "closed":
        programs.close()
        shutil.rmtree(folder)
    else:
        shutil.rmtree(folder)
        if harm == "replaced by a file":
            folder.write_text("not a directory")
    assert programs.get(b"k") is None
    programs[b"k"] = b"new"
    assert programs.get(b"k") in (None, b"new")
    with pytest.raises(KeyError):
        del programs[b"never stored"]


@pytest.mark.parametrize(("key", "value"), [(1, b""), (b"k", "text"), (b"k", None)])
def test_wrong_arguments(key: object, value: object, programs: ProgramCache) -> None:
    with pytest.raises(TypeError, match="bytes"):
        programs[key] = value  # type: ignore[index]


def test_the_cap_holds(tmp_path: Path) -> None:
    with ProgramCache(tmp_path / "programs", max_size_bytes=20_000) as programs:
        for number in range(40):
            programs[str(number)] = bytes(1500)
            assert sum(path.stat().st_size for path in _stored(tmp_path / "programs")) <= 20_000
        programs["large"] = bytes(30_000)
        assert programs.get("large") is None
        assert len(programs) > 5


def test_a_read_only_tier_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ProgramCache(tmp_path / "layer") as layer:
        layer[b"k"] = b"from the layer"
    monkeypatch.setenv("KCACHE_REMOTE", f"file://{tmp_path}/layer")
    with ProgramCache(tmp_path / "own") as own:
        assert own.get(b"k") == b"from the layer"
        assert own.get(b"missing") is None


def test_compile_with_headers_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KCACHE_DIR", str(tmp_path / "cache"))
    header = write(tmp_path / "include/scale.h", "#define SCALE 2\n")
    options = core.ProgramOptions(arch="sm_90", include_path=[str(header.parent)], name="scale.cu")
    names = ["t<float>", b"t<int>"]

    def plain() -> object:
        program = core.Program(TEMPLATE, "c++", options)
        return program.compile("cubin", name_expressions=names)

    for value in (2, 2, 3):
        header.write_text(f"#define SCALE {value}\n")
        wanted, got = plain(), compile(TEMPLATE, options, names)
        assert bytes(got.code) == bytes(wanted.code)
        assert got.symbol_mapping == wanted.symbol_mapping
        assert (got.name, got.code_type) == (wanted.name, wanted.code_type)
    ptx = compile(TEMPLATE, options, names, target_type="ptx")
    assert b"Generated by NVIDIA NVVM Compiler" in bytes(ptx.code)


def test_compile_refuses(tmp_path: Path) -> None:
    options = core.ProgramOptions(arch="sm_90")
    with pytest.raises(TypeError, match=r"expected source text .*, got Program"):
        compile(core.Program(SOURCE, "c++", options))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected one of cubin, ptx, ltoir"):
        compile(SOURCE, options, target_type="exe")
    with pytest.raises(ValueError, match="produce no ltoir"):
        compile(SOURCE, options, target_type="ltoir")
    with pytest.raises(kcache.CompileError):
        compile("nonsense", options)


def test_an_older_cuda_core_is_refused_with_the_reason(tmp_path: Path) -> None:
    write(tmp_path / "cuda/__init__.py", "")
    write(tmp_path / "cuda/core/__init__.py", "class ObjectCode: ...\nclass ProgramOptions: ...\n")
    write(tmp_path / "cuda/core/utils.py", "")
    done = python("import kcache.integrations.cuda_core", environ={"PYTHONPATH": str(tmp_path)})
    assert "expected cuda-core 1.2 or later" in done.stderr.splitlines()[-1]
