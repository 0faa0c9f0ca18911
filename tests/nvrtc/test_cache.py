"""KernelCache with the real compiler: which requests hit, in which cache, and after which calls."""

import io
import itertools
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from core.helpers import run_all, snapshot
from nvrtc.reference import ARCH, KERNEL, PTX, agreed, write

import kcache

pytestmark = pytest.mark.usefixtures("nvrtc")

SEVEN = KERNEL.replace("V", "7")


@pytest.fixture
def header(tmp_path: Path) -> Path:
    return write(tmp_path / "inc/x.h", "#define V 1\n")


@pytest.fixture
def options(header: Path) -> kcache.CompileOptions:
    return PTX.replace(include_paths=[header.parent])


WITH_HEADER = "#include <x.h>\n" + KERNEL
BOTH = pytest.mark.parametrize("source", [SEVEN, WITH_HEADER], ids=["alone", "with header"])


@BOTH
class TestHits:
    def test_memory_then_disk_then_none(self, tmp_path, cache, options, source):
        assert cache.lookup(source, (), options) is None
        first = agreed(cache, source, options)
        again = agreed(cache, source, options)
        assert (first.cached, again.cached) == (False, True)
        assert (first.key, first.compile_seconds) == (again.key, again.compile_seconds)
        assert cache.lookup(source, (), options) == again
        stats = cache.stats()
        assert (stats.hits, stats.memory_hits, stats.misses) == (2, 2, 2)
        cache.clear_memory()
        assert agreed(cache, source, options).cached
        assert cache.stats().memory_hits == 2
        with kcache.KernelCache(tmp_path / "cache") as other:
            assert agreed(other, source, options).cached
            assert (other.stats().hits, other.stats().memory_hits) == (1, 0)
        assert cache.clear() == (1 if source == SEVEN else 2)
        assert not agreed(cache, source, options).cached

    def test_read_only(self, tmp_path, cache, options, source):
        with kcache.KernelCache(tmp_path / "cache", read_only=True) as reader:
            assert [agreed(reader, source, options).cached for _ in range(2)] == [False, False]
            assert cache.lookup(source, (), options) is None
            agreed(cache, source, options)
            before = snapshot(tmp_path / "cache")
            assert agreed(reader, source, options).cached
            reader.clear_memory()
            assert agreed(reader, source, options).cached
            assert reader.trim(0) == 0
            assert reader.clear() == 0
        assert snapshot(tmp_path / "cache") == before

    def test_read_only_where_there_is_nothing(self, tmp_path, options, source):
        with kcache.KernelCache(tmp_path / "none", read_only=True) as reader:
            assert not agreed(reader, source, options).cached
        assert not (tmp_path / "none").exists()

    def test_disable(self, tmp_path, cache, options, source):
        agreed(cache, source, options)
        before = snapshot(tmp_path / "cache")
        with kcache.KernelCache(tmp_path / "cache", disable=True) as off:
            assert not agreed(off, source, options).cached
            assert off.lookup(source, (), options) is None
            assert not agreed(off, source + "// other", options).cached
            assert off.stats().hits == 0
        assert snapshot(tmp_path / "cache") == before

    def test_recache(self, tmp_path, cache, options, source):
        agreed(cache, source, options)
        with kcache.KernelCache(tmp_path / "cache", recache=True) as again:
            assert not agreed(again, source, options).cached
            assert not agreed(again, source, options).cached
            assert again.stats().hits == 0
        cache.clear_memory()
        assert agreed(cache, source, options).cached


# -- header checks ---------------------------------------------------------------------------------


class TestHeaderCheck:
    def test_once_per_process(self, tmp_path, header, options):
        with kcache.KernelCache(tmp_path / "cache", header_check="once") as cache:
            first = agreed(cache, WITH_HEADER, options)
            header.write_text("#define V 2\n")
            assert cache.get_or_compile(WITH_HEADER, (), options).ptx == first.ptx
            assert cache.why(WITH_HEADER, (), options).hit
            cache.clear_memory()  # this also forgets which headers were checked
            assert not agreed(cache, WITH_HEADER, options).cached
            assert agreed(cache, WITH_HEADER, options).cached
        with kcache.KernelCache(tmp_path / "cache", header_check="once") as cache:
            assert agreed(cache, WITH_HEADER, options).cached
            header.write_text("#define V 1\n")
            assert cache.get_or_compile(WITH_HEADER, (), options).ptx != first.ptx
        with kcache.KernelCache(tmp_path / "cache") as cache:
            assert agreed(cache, WITH_HEADER, options).cached

    def test_many_versions_of_a_header(self, tmp_path, header, options):
        """A manifest keeps 16 versions: it forgets the oldest, and no version gets a wrong kernel."""
        with kcache.KernelCache(tmp_path / "cache") as cache:
            for version in (*range(17), 0):
                header.write_text(f"#define V {version}\n")
                assert not cache.get_or_compile(WITH_HEADER, (), options).cached
            for version in range(16, 8, -1):
                header.write_text(f"#define V {version}\n")
                kernel = cache.lookup(WITH_HEADER, (), options)
                assert kernel is not None
                assert f", {version};".encode() in kernel.ptx

    def test_dependencies_are_listed(self, cache, header, options):
        for _ in range(2):
            assert agreed(cache, WITH_HEADER, options).dependencies == (str(header),)
        assert agreed(cache, SEVEN, options).dependencies == ()


# -- at the same time ------------------------------------------------------------------------------


def test_a_header_changes_during_compiles(cache, header, options):
    """Every kernel that was stored meanwhile belongs to the header that it was compiled with."""
    sources = [WITH_HEADER, *(WITH_HEADER + f"// {number}" for number in range(2))]
    done = threading.Event()

    def meddle() -> None:
        for number in itertools.count():
            header.write_text(f"#define V {number % 2}\n")
            if done.is_set():
                return

    def compile_all() -> None:
        try:
            for source in (*sources, *sources):
                with suppress(kcache.CompileError):  # the header may be half written
                    cache.get_or_compile(source, (), options)
        finally:
            done.set()

    assert run_all(meddle, compile_all) == [None] * 2
    for number in range(2):
        header.write_text(f"#define V {number}\n")
        for source in sources:
            agreed(cache, source, options)


def test_print_info(cache, header, options):
    agreed(cache, WITH_HEADER, options)
    agreed(cache, WITH_HEADER, options)
    out = io.StringIO()
    cache.print_info(out)
    text = out.getvalue().lower()
    first = "directory|backend|entries|size|hits|misses|hit rate|evictions"
    for word in f"{first}|average compile|average cache|saved|corrupt|stale".split("|"):
        assert word in text, word


def test_a_cache_records_from_the_call_on_and_to_the_end_of_a_block(cache, tmp_path):
    path = tmp_path / "recorded.jsonl"

    def ask(number: int) -> None:
        cache.lookup(f'extern "C" __global__ void k{number}() {{}}', (), ARCH)

    def recorded() -> list[str]:
        return [n for n in "0123" if f"void k{n}()" in path.read_text()]

    ask(0)
    with cache.record(path):
        ask(1)
        ask(1)
    ask(2)
    assert recorded() == ["1"]
    cache.record(path)  # without a block, everything after this call is recorded
    ask(3)
    assert recorded() == ["1", "3"]


def test_ptx_is_bytes_of_text_without_a_nul(cache):
    source = '// \u00e4\nextern "C" __global__ void f(char* p) { p[0] = "\u00e4"[0]; }'
    made = cache.get_or_compile(source, options=kcache.CompileOptions(arch="sm_90"))
    for kernel in (made, cache.lookup(source, options=kcache.CompileOptions(arch="sm_90"))):
        assert kernel.ptx is not None
        assert "\0" not in kernel.ptx.decode("utf-8")
        assert ".entry f(" in kernel.ptx.decode("utf-8")
        assert repr(kernel).startswith("CompiledKernel('f', arch='sm_90', ptx=")
