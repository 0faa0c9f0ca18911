"""The environment: variables that NVRTC reads, and the spelling of the working directory."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from nvrtc.reference import ARCH, KERNEL, REL, compile_clean, write
from nvrtc.talk import ask, worker

import kcache
from kcache import KernelCache

pytestmark = pytest.mark.usefixtures("nvrtc")


def clean(
    cache: KernelCache, source: str, options: kcache.CompileOptions = ARCH, **arguments: str
) -> kcache.CompiledKernel:
    """Return the cache's kernel, and assert that a new process with this environment agrees."""
    expected = compile_clean(source, options.flags(), **arguments)
    kernel = cache.get_or_compile(source, (), options, **arguments)
    assert (kernel.ptx, kernel.cubin) == (expected.ptx, expected.cubin), kernel.cached
    return kernel


# -- variables -------------------------------------------------------------------------------------


#: Variables that the compiler reads, and values that change its outputs, or might change them.
ASKED_FOR = {
    "NVRTC_APPEND_FLAGS": ["-DW=3"],
    "FINALIZER_USE_LEGACY_ELF_BUILDER": ["1", ""],
    "NVVM_IR_VER_CHK": ["0"],
    "FINALIZER_CUBIE": ["1"],
    "EDG_BASE": ["/nowhere"],
}


@pytest.mark.parametrize(
    ("include", "names"),
    [("#include <x.h>\n", [*ASKED_FOR]), ("", ["FINALIZER_USE_LEGACY_ELF_BUILDER"])],
    ids=["with a header", "without"],
)
def test_a_variable_that_the_compiler_asks_for(
    cache: KernelCache,
    tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    include: str,
    names: list[str],
) -> None:
    write(tree / "inc/x.h", "#ifndef W\n#define W 0\n#endif\n")
    source = include + "#ifndef W\n#define W 1\n#endif\n" + REL + KERNEL.replace("V", "W")
    options = ARCH.replace(include_paths=["inc"])
    plain = clean(cache, source, options)
    made = {}
    for name in names:
        for value in ASKED_FOR[name]:
            monkeypatch.setenv(name, value)
            made[name, value] = clean(cache, source, options)
        monkeypatch.delenv(name)
    for (name, value), kernel in made.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert _looked_up(cache, source, options) == (kernel.ptx, kernel.cubin)
        assert _looked_up(cache, source, options) == (plain.ptx, plain.cubin)


@pytest.mark.parametrize("listed", [True, False])
def test_another_answer_about_a_variable_is_a_miss_whatever_is_made_of_it(
    cache: KernelCache, tree: Path, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    """Variables in the list `IN_KEY` are part of the key; others are compared with the manifest."""
    if not listed:
        monkeypatch.setattr("kcache.environment.IN_KEY", ())
    write(tree / "inc/x.h", "#define V 1\n")
    source, options = "#include <x.h>\n" + KERNEL, ARCH.replace(include_paths=["inc"])
    with worker() as process:
        trace = process.ask(ask(source, options.flags()), None).trace
    assert trace is not None
    name = next(name for name in trace.variables if name != "PWD")
    cache.get_or_compile(source, (), options)
    assert cache.lookup(source, (), options) is not None
    with monkeypatch.context() as patch:
        patch.setenv(name, "/nowhere")
        assert cache.lookup(source, (), options) is None
    assert cache.lookup(source, (), options) is not None


def _looked_up(cache: KernelCache, source: str, options: kcache.CompileOptions) -> object:
    kernel = cache.lookup(source, (), options)
    return kernel and (kernel.ptx, kernel.cubin)


def test_idle_variable(cache: KernelCache, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tree / "inc/x.h", "#define V 1\n")
    options = ARCH.replace(include_paths=["inc"])
    source = "#include <x.h>\n" + KERNEL
    plain = clean(cache, source, options)
    for name, value in (
        ("MAKEFLAGS", "-j8 --jobserver-auth=3,4"),
        ("CUDA_CACHE_DISABLE", "0"),
        ("LC_ALL", "C"),
        ("OTHER", "x"),
        ("PWD", "/nowhere"),
    ):
        monkeypatch.setenv(name, value)
        assert _looked_up(cache, source, options) == (plain.ptx, plain.cubin)
    assert clean(cache, source, options).cached


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """The parent of a directory `project`, which is the working directory, and of a link to it."""
    project = tmp_path / "project"
    write(project / "inc/x.h", "#define V 1\n#define F __FILE__\n")
    (tmp_path / "link").symlink_to(project)
    before = os.getcwd()
    os.chdir(project)
    yield tmp_path
    os.chdir(before)


@pytest.mark.parametrize(
    ("lineinfo", "name", "spellings"),
    [
        (True, "src/kernel.cu", ["{}/link", "{}/link/inc/..", "/nowhere", "link"]),
        (True, "kernel.cu", ["{}/link/"]),
        (False, "kernel.cu", ["{}/link"]),
    ],
)
def test_how_the_user_spells_the_working_directory(
    cache: KernelCache,
    elsewhere: Path,
    monkeypatch: pytest.MonkeyPatch,
    lineinfo: bool,
    name: str,
    spellings: list[str],
) -> None:
    """Line information has the spelling of `PWD` if `PWD` leads to the working directory."""
    source = '#include <x.h>\n__device__ const char f[] = F;\nextern "C" __global__ void k(char* o) { *o = f[V]; }\n'
    options = ARCH.replace(include_paths=["inc"], lineinfo=lineinfo)
    monkeypatch.delenv("PWD", raising=False)
    clean(cache, source, options, source_name=name)
    for spelling in (*spellings, "{}/project"):
        monkeypatch.setenv("PWD", spelling.format(elsewhere))
        clean(cache, source, options, source_name=name)
        assert cache.lookup(source, (), options, source_name=name) is not None
