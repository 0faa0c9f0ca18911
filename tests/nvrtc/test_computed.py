"""Computed includes, as the compiler tells of them and as their text does."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from nvrtc.reference import ARCH, KERNEL, agreed, working_directory, write

import kcache

pytestmark = pytest.mark.usefixtures("nvrtc")


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    """A project folder, which is the working directory."""
    folder = tmp_path / "tree"
    folder.mkdir()
    with working_directory(folder):
        yield folder


@pytest.fixture(params=["trace", "scan"], autouse=True)
def _told_by(request: pytest.FixtureRequest) -> Iterator[None]:
    """With a limit on the length of files nothing is traced: NVRTC would abort the process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if request.param == "scan":
        resource.setrlimit(resource.RLIMIT_FSIZE, (128 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _follows(
    cache: kcache.KernelCache, header: Path, source: str, options: kcache.CompileOptions
) -> None:
    """Assert that a change of `header` shows."""
    header.write_text("#define V 1\n")
    agreed(cache, source, options, source_name="src/kernel.cu")
    header.write_text("#define V 2\n")
    agreed(cache, source, options, source_name="src/kernel.cu")


def test_beyond_a_tree_that_is_taken_whole(cache, tree):
    """What a computed include may have named includes a header outside of all directories."""
    header = write(tree / "elsewhere/x.h", "")
    write(tree / "inc/sub/a.h", '#include "../b.h"\n')
    write(tree / "inc/b.h", '#include "../elsewhere/x.h"\n')
    source = "#define GLUE(a, b) <a##b>\n#include GLUE(sub/a, .h)\n" + KERNEL
    _follows(cache, header, source, ARCH.replace(include_paths=["inc"]))


@pytest.mark.parametrize("to", ["../elsewhere", "{}/elsewhere"], ids=["up", "absolute"])
@pytest.mark.parametrize(
    "lines",
    [
        "#define SHOW(x) #x\n#define TEXT(x) SHOW(x)\n#include TEXT(WHERE/x.h)\n",
        "#define NAME WHERE/x.h\n#define SHOW(x) #x\n#define TEXT(x) SHOW(x)\n#include TEXT(NAME)\n",
        "#define GLUE(a) <WHERE/a##.h>\n#include GLUE(x)\n",
    ],
    ids=["text", "two macros", "glued"],
)
def test_a_macro_leads_out(cache, tree, to, lines):
    header = write(tree / "elsewhere/x.h", "")
    (tree / "inc").mkdir()
    options = ARCH.replace(include_paths=["inc"], defines={"WHERE": to.format(tree)})
    _follows(cache, header, lines + KERNEL, options)


@pytest.mark.parametrize(
    "define",
    ["", "#ifndef __CUDA_ARCH__\n#define __CUDA_ARCH__ 1\n#endif\n"],
    ids=["built in", "defined where it is not"],
)
def test_a_macro_of_the_compiler_is_in_the_name(cache, tree, define):
    header = write(tree / "inc/sm/800/x.h", "")
    source = f"{define}#define HDR <sm/__CUDA_ARCH__/x.h>\n#include HDR\n" + KERNEL
    _follows(cache, header, source, ARCH.replace(include_paths=["new", "inc"]))
    write(tree / "new/sm/800/x.h", "#define V 3\n")
    agreed(cache, source, ARCH.replace(include_paths=["new", "inc"]), source_name="src/kernel.cu")


def test_a_tree_taken_whole_still_hits(cache, tree):
    write(tree / "inc/x.h", "#define V 1\n")
    source = "#define GLUE(a, b) <a##b>\n#include GLUE(x, .h)\n" + KERNEL
    options = ARCH.replace(include_paths=["inc"])
    assert not agreed(cache, source, options).cached
    assert agreed(cache, source, options).cached
