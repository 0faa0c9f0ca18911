"""README.md: it fits one screen, and its program and its code compile once and hit afterwards."""

import re
import sys
from pathlib import Path

import pytest
from core.helpers import output_of, run
from docs.pages import ROOT, blocks

README = ROOT / "README.md"
#: Stands for a program that trains.
TRAIN = """
from cuda.bindings import nvrtc
for name in (b"forward", b"backward", b"update"):
    source = b'extern "C" __global__ void %s(float* x) { *x = 0; }' % name
    _, program = nvrtc.nvrtcCreateProgram(source, name, 0, [], [])
    nvrtc.nvrtcCompileProgram(program, 1, [b"-arch=sm_90"])
"""


def test_it_fits_one_screen() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 90


@pytest.mark.usefixtures("nvrtc")
def test_a_program_compiles_once_and_then_hits(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings")
    (tmp_path / "train.py").write_text(TRAIN)
    block = next(block for block in blocks(README) if block.language == "console")
    lines = block.text.splitlines()
    for command, said in zip(lines[::2], lines[1::2], strict=True):
        words = command.removeprefix("$ kcache ").replace("python ", f"{sys.executable} ").split()
        done = run(sys.executable, "-m", "kcache", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        told, wanted = (re.sub(r"saved .*", "", text) for text in (done.stderr, said))
        assert told.strip() == wanted.strip()


@pytest.mark.usefixtures("nvrtc")
def test_the_code_compiles_once_and_hits_in_the_next_process() -> None:
    code = next(block.text for block in blocks(README) if block.language == "python")
    runs = [output_of(code) for _ in range(2)]
    assert [run.splitlines()[0].rsplit(maxsplit=1)[-1] for run in runs] == ["False", "True"]
