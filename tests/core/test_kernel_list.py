"""Lists of kernels: what they may contain, what is an error, and what a recorder writes."""

import contextlib
import json
import logging
import os
import stat
from pathlib import Path

import pytest
from core.helpers import fork, wait

from kcache import CompileOptions, ConfigError
from kcache.nvrtc.request import Request
from kcache.warm.kernel_list import ListedKernel, read_list
from kcache.warm.recording import RequestRecorder, refuse_other_file

KERNEL = "__global__ void k() {}\n"
INCLUDING = '#include "scale.cuh"\n' + KERNEL


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with sources. The working directory is another one."""
    place = tmp_path / "project"
    for name in ("a.cu", "src/b.cu", "src/deep/c.cu"):
        source = place / name
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(INCLUDING)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return place


def listed(folder: Path, text: str, *archs: str) -> list[ListedKernel]:
    path = folder / "kernels.toml"
    path.write_text(text)
    return read_list(str(path), archs)


def refused(folder: Path, text: str, *archs: str) -> str:
    with pytest.raises(ConfigError) as caught:
        listed(folder, text, *archs)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'kernels.toml'}")
    return message.removeprefix(f"{folder / 'kernels.toml'}")


def options(wanted: ListedKernel) -> CompileOptions:
    assert wanted.request.options is not None
    return wanted.request.options


# -- what a list may contain -----------------------------------------------------------------------


def test_toml_and_json_say_the_same(folder: Path) -> None:
    toml = listed(
        folder,
        """
        [defaults]
        archs = ["sm_80", "sm_90a"]
        std = "c++17"
        defines = { TILE = 128 }

        [[kernels]]
        source = "a.cu"
        names = ["f<int>", "f<float>"]
        """,
    )
    document = {
        "defaults": {"archs": ["sm_80", "sm_90a"], "std": "c++17", "defines": {"TILE": 128}},
        "kernels": [{"source": "a.cu", "names": ["f<int>", "f<float>"]}],
    }
    (folder / "kernels.json").write_text(json.dumps(document))
    assert read_list(str(folder / "kernels.json")) == toml
    for path in (folder / "kernels.json", folder / "kernels.toml"):  # with a byte order mark
        path.write_bytes("\ufeff".encode() + path.read_bytes())
        assert read_list(str(path)) == toml
    assert [each.arch for each in toml] == ["sm_80", "sm_90a"]
    assert options(toml[0]) == CompileOptions("sm_80", "c++17", defines=["TILE=128"])
    assert toml[0].request.names == ("f<int>", "f<float>")
    assert toml[0].title == "a.cu: f<int>, f<float>"
    assert toml[0].request.source == INCLUDING


def test_a_kernel_replaces_defaults_and_the_command_line_the_archs(folder: Path) -> None:
    text = """
        defaults = { archs = ["sm_80"], std = "c++14", defines = ["A", "B"], fast_math = true }
        kernels = [
            { source = "a.cu" },
            { source = "src/b.cu", arch = 90, std = "c++20", defines = ["C"], fast_math = false },
        ]
        """
    first, second = map(options, listed(folder, text))
    assert first == CompileOptions("sm_80", "c++14", defines=["A", "B"], fast_math=True)
    assert second == CompileOptions("sm_90", "c++20", defines=["C"])
    assert [each.arch for each in listed(folder, text, "100f", "sm_120")] == [
        *("sm_100f", "sm_120") * 2
    ]


def test_globs_are_sorted_and_each_kernel_is_there_once(folder: Path) -> None:
    found = listed(
        folder,
        """
        defaults.arch = "sm_90"
        kernels = [
            { source = ["src/deep/c.cu", "a.cu"] },
            { source = "**/*.cu" },
            { source = "a.cu", names = "f<int>" },
        ]
        """,
        "sm_90",
        "90",
    )
    assert [each.title for each in found] == ["src/deep/c.cu", "a.cu", "src/b.cu", "a.cu: f<int>"]


# -- errors in a list ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ": kernels: expected [[kernels]] with source or text, got none"),
        (
            "kernel = []",
            ": no key 'kernel' (did you mean 'kernels'?); expected one of defaults, kernels",
        ),
        (
            "defaults = { sdt = 'c++17' }\nkernels = [{}]",
            ", defaults: no key 'sdt' (did you mean 'std'?); expected one of archs, ",
        ),
        ("kernels = [{}]", ", kernel 1: expected one of source and text, got both or neither"),
        ("kernels = [{ source = 'a.cu' }, { nmaes = 1 }]", ", kernel 2: no key 'nmaes' (did you"),
        ("kernels = [{ source = 'missing.cu' }]", ", kernel 1: source='missing.cu': no such file"),
        ("kernels = [{ source = 'x/**/*.cu' }]", ", kernel 1: source='x/**/*.cu': no such file"),
        ("kernels = [{ source = '*.bin' }]", ", kernel 1: "),
        (
            "kernels = [{ text = 'x', fast_math = 1 }]",
            ", kernel 1: fast_math: expected True or False, got 1",
        ),
        (
            "kernels = [{ text = 'x', headers = { h = 1 } }]",
            ", kernel 1: headers['h']: expected text (str), got int",
        ),
        ("kernels = [{ text = 'x', directory = 'no' }]", ", kernel 1: directory='no': no such"),
        ("kernels = [", " is not TOML: "),
    ],
)
def test_an_invalid_list_is_an_error_with_its_position(text: str, said: str, folder: Path) -> None:
    (folder / "bad.bin").write_bytes(b"x\xff")
    assert refused(folder, text, "sm_90").startswith(said)


def test_without_arch_and_gpu_it_asks_for_one(folder: Path) -> None:
    from kcache.util.cuda_driver import current_arch

    with contextlib.suppress(ConfigError):
        pytest.skip(f"there is a GPU: {current_arch()}")
    said = refused(folder, "kernels = [{ text = 'x', arch = 90 }, { text = 'x' }]")
    assert said.startswith(", kernel 2: archs: none is given, and there is no GPU to take it")
    assert "--arch sm_90" in said


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("kernels.yaml", b"kernels: []", r"expected a list of kernels \(.toml, .json\)"),
        ("kernels.json", b"[" * 100_000, "is not JSON"),
        ("kernels.json", b"[]", "the file: expected a table, got list"),
        ("kernels.json", b'{"kernels": "\xff"}', "is not text: byte 13 is 0xff; expected UTF-8"),
    ],
)
def test_a_file_that_is_not_a_list_is_refused(
    name: str, data: bytes, said: str, folder: Path
) -> None:
    (folder / name).write_bytes(data)
    with pytest.raises(ConfigError, match=said):
        read_list(str(folder / name), ["sm_90"])


# -- recorded --------------------------------------------------------------------------------------


def request(source: str = KERNEL, options: CompileOptions | None = None, **more: object) -> Request:
    """Return the request that a cache makes for these arguments."""
    arguments = {"names": (), "headers": None, "extra_key": b"", "source_name": "kernel.cu", **more}
    return Request.make(source, options=options or CompileOptions(90), compiler="c", **arguments)


def test_each_request_is_written_once_but_once_for_each_place(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "kernels.jsonl"
    recorder = RequestRecorder("../kernels.jsonl")
    for place in ("elsewhere", "project", "elsewhere"):
        os.chdir(tmp_path / place)
        for _ in range(3):
            recorder.note(request())
            recorder.note(request(INCLUDING))
    assert len(path.read_bytes().split()) > 3
    assert path.read_bytes().count(b"\n") == 3
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 or os.name == "nt"
    RequestRecorder(path).note(request(INCLUDING))
    assert path.read_bytes().count(b"\n") == 4
    assert len(read_list(str(path))) == 3
    recorder.close()
    recorder.close()
    recorder.note(request(names="f"))
    assert path.read_bytes().count(b"\n") == 4


def test_a_torn_line_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "kernels.jsonl"
    recorder = RequestRecorder(path)
    recorder.note(request())
    whole = path.read_bytes()
    assert whole.startswith(b"{")
    path.write_bytes(whole[: len(whole) // 2])  # as if a process was killed during its write
    recorder.note(request(names="f<int>"))
    with path.open("ab") as stream:
        stream.write(b"\n   \n" + b"[" * 100_000 + b"\n\xff\xfe\n" + whole[:-2])
    assert [each.title for each in read_list(str(path))] == ["f<int>"]
    assert [record.getMessage().partition(", ")[2] for record in caplog.records] == [
        f"line {number} is incomplete and was skipped" for number in (1, 5, 6, 7)
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[]", "expected a recorded request"),
        ('{"kcache_request": 2}', "kcache_request: expected 1, got 2"),
        ('{"kcache_request": 1}', "'roots' is missing"),
        ('{"kcache_request": 1, "roots": [], "options": {"new": 1}}', "unexpected argument 'new'"),
        ('{"kcache_request": 1, "roots": [], "options": {"std": 1}}', "std: expected"),
    ],
)
def test_a_line_that_is_not_a_request_is_an_error(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "kernels.jsonl"
    path.write_text(f"\n{line}")
    with pytest.raises(ConfigError) as caught:
        read_list(str(path), ["sm_90"])
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)


def test_unwritable_recordings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = RequestRecorder(tmp_path / "missing" / "kernels.jsonl")
    recorder.note(request())
    recorder.note(request(names="f"))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"kernels are not recorded in {recorder.path}: ")


@pytest.mark.parametrize("kind", ["notes", "link", "second name"])
def test_other_files_are_kept(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, notes = tmp_path / "kernels.jsonl", tmp_path / "notes"
    notes.write_text("mine\n" if kind == "notes" else "")
    if kind == "notes":
        notes.rename(path)
        notes = path
    elif kind == "link":
        path.symlink_to(notes)
    else:
        os.link(notes, path)
    before = notes.read_bytes()
    RequestRecorder(path).note(request())
    with pytest.raises(ConfigError, match="can't be recorded in"):
        refuse_other_file(str(path))
    assert notes.read_bytes() == before
    (record,) = caplog.records
    reason = {"notes": "not a recording; expected", "link": "a link", "second name": "2 names"}
    assert reason[kind] in record.getMessage()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_processes_append_whole_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Processes that record into one file at the same time append whole lines, also after forks."""
    path = tmp_path / "kernels.jsonl"
    recorder = RequestRecorder(path)
    recorder.note(request())
    comment = "/" * 20_000  # larger than an atomic write to a pipe

    def note(child: int) -> None:
        recorder.note(request())  # the parent has already written this request
        for n in range(50):
            recorder.note(request(f"//{comment}\n{KERNEL}", names=(f"f<{child}, {n}>",)))

    children = [fork(lambda child=child: note(child)) for child in range(4)]
    note(4)
    assert [wait(child) for child in children] == [0] * 4
    assert len(read_list(str(path))) == 1 + 5 * 50
    lines = path.read_bytes().splitlines()
    assert lines[0]
    assert len([*filter(None, lines)]) == 1 + 5 * 50
    assert caplog.records == []
