"""nvcc: a hit of kcache's client with a running daemon, compared with ccache and nvcc itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvcc_peers
import pytest
from keep import Keep

CUB = """\
#include <cub/cub.cuh>
extern "C" __global__ void kernel(int* p) {
    __shared__ typename cub::BlockReduce<int, 128>::TempStorage space;
    p[threadIdx.x] = cub::BlockReduce<int, 128>(space).Sum(p[threadIdx.x]);
}
"""
#: How many files the sources of a PyTorch extension include.
MANY_FILES = 5900
CONTENDERS = {"kcache": nvcc_peers.Kcache, "ccache": nvcc_peers.Ccache, "nvcc": nvcc_peers.Nvcc}


@pytest.mark.beside("nvcc {option} of CUB", "{contender}")
@pytest.mark.parametrize("contender", CONTENDERS)
@pytest.mark.parametrize("option", ["-c", "-cubin"])
@pytest.mark.slow
@pytest.mark.laps(1)
def test_nvcc(benchmark: Any, keep: Keep, contender: str, option: str) -> None:
    benchmark(keep(_start, contender, option))


@pytest.mark.beside("nvcc -c of a source with 5,900 included files", "{contender}")
@pytest.mark.parametrize("contender", ["kcache", "ccache"])
@pytest.mark.slow
@pytest.mark.laps(1)
def test_many_files(benchmark: Any, keep: Keep, contender: str) -> None:
    folder = keep.folder()
    includes = []
    for number in range(MANY_FILES):
        path = folder / f"include/part{number // 100}/h{number}.h"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#pragma once\nconstexpr int value{number} = {number};\n")
        includes.append(f'#include "part{number // 100}/h{number}.h"\n')
    (folder / "k.cu").write_text(
        "".join(includes) + "__global__ void kernel(int* p) { *p = value7; }\n"
    )
    benchmark(keep(_start, contender, "-c", folder))


def _start(
    keep: Keep, contender: str, option: str, project: Path | None = None
) -> Callable[[], object]:
    folder = keep.folder()
    try:
        wheels, by = nvcc_peers.find_wheels(), keep(_contender, contender)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    nvcc = nvcc_peers.toolkit(wheels, folder / "cuda") / "bin/nvcc"
    if project is None:
        (folder / "k.cu").write_text(CUB)
    folder = project or folder
    arguments = (option, "-arch=sm_90", "-Iinclude", "k.cu", "-o", "k.out")
    if by.run(nvcc, *arguments, cwd=folder) != 0:
        raise RuntimeError("it does not compile")
    return lambda: by.run(nvcc, *arguments, cwd=folder)


def _contender(keep: Keep, name: str) -> nvcc_peers.Nvcc:
    made = CONTENDERS[name](Path(keep.folder()))
    keep.callback(made.close)
    return made
