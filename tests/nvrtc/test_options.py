"""CompileOptions: each field reaches NVRTC, and separates what is cached."""

import re
from contextlib import chdir
from ctypes.util import find_library

import pytest
from nvrtc.reference import ARCH, KERNEL, agreed, compile_fresh, write

import kcache
from kcache import CompileOptions
from kcache.errors import ArgumentTypeError
from kcache.nvrtc.options import parse_arch, parse_options

SEVEN = KERNEL.replace("V", "7")
#: A source for which each option below changes the machine code.
_SOURCE = """
#ifndef N
#define N 3
#endif
extern "C" __global__ void k(float* x) {
    x[0] = x[1] / x[2] + x[3] * x[4] + N + __cplusplus % 1000;
}
"""


def _machine_code(kernel: kcache.CompiledKernel) -> bytes:
    return kernel.cubin or kernel.ltoir or kernel.ptx or b""


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with kcache.KernelCache(tmp_path_factory.mktemp("shared")) as cache:
        yield cache


@pytest.mark.usefixtures("nvrtc")
class TestFields:
    @pytest.mark.parametrize(
        ("change", "shown"),
        [
            ({"arch": "sm_90"}, True),
            ({"arch": "compute_80"}, True),
            ({"std": "c++20"}, True),
            ({"fast_math": True}, True),
            ({"optimization": 0}, True),
            ({"optimization": 3}, None),  # the default
            ({"lto": True}, True),
            ({"debug": True}, True),
            ({"lineinfo": True}, True),
            ({"max_registers": 16}, None),
            ({"defines": {"N": 4}}, True),
            ({"defines": {"M": None}}, False),
            ({"extra_options": ["--ftz=true"]}, True),
            ({"include_paths": ["nowhere"]}, False),
        ],
    )
    def test_reaches_the_compiler_and_separates_entries(self, shared, change, shown):
        cache = shared
        plain = agreed(cache, _SOURCE)
        options = ARCH.replace(**change)
        changed = agreed(cache, _SOURCE, options)
        assert not changed.cached
        assert changed.key != plain.key
        assert shown in (None, _machine_code(changed) != _machine_code(plain))
        for asked, kernel in ((options, changed), (ARCH, plain)):
            found = cache.lookup(_SOURCE, (), asked)
            assert found is not None
            assert _machine_code(found) == _machine_code(kernel)

    @pytest.mark.parametrize(
        ("options", "outputs"),
        [
            ({"arch": "sm_80"}, "ptx cubin"),
            ({"arch": "sm_90a"}, "ptx cubin"),
            ({"arch": "sm_100f"}, "ptx cubin"),
            ({"arch": "sm_120"}, "ptx cubin"),
            ({"arch": "compute_90a"}, "ptx"),
            ({"extra_options": ["-arch", "compute_80"]}, "ptx"),
            ({"extra_options": [" --gpu-architecture=sm_90 "]}, "ptx cubin"),
        ],
    )
    def test_architectures(self, cache, nvrtc, options, outputs):
        known_since = {"sm_100f": (12, 9), "sm_120": (12, 8)}
        if nvrtc < known_since.get(options.get("arch"), (12, 4)):
            pytest.skip(f"NVRTC {nvrtc} does not support {options['arch']}")
        made = CompileOptions(**options)
        agreed(cache, SEVEN, made)
        for kernel in (cache.lookup(SEVEN, (), made),):
            assert kernel is not None
            have = [name for name in ("ptx", "cubin", "ltoir") if getattr(kernel, name) is not None]
            assert have == outputs.split()
        if kernel.ptx is not None:
            target = re.search(rb"\.target (\S+)", kernel.ptx)
            assert target is not None
            number = re.sub(r"\D+", "", str(made.target))
            assert target[1].decode().startswith(f"sm_{number}")


@pytest.mark.usefixtures("nvrtc")
class TestLog:
    SOURCE = 'extern "C" __global__ void k(int* out) { int unused = 3; *out = 1; }\n'

    def test_warnings_are_given_back_on_a_hit(self, tmp_path, cache):
        first = cache.get_or_compile(self.SOURCE, (), ARCH)
        assert "unused" in first.log
        assert cache.get_or_compile(self.SOURCE, (), ARCH).log == first.log
        with kcache.KernelCache(tmp_path / "cache") as other:
            assert other.get_or_compile(self.SOURCE, (), ARCH).log == first.log
        assert first.log == compile_fresh(self.SOURCE, ARCH.flags()).log

    def test_a_kernel_saves_its_compile_once_in_each_process_that_gets_it(self, cache, tmp_path):
        first = cache.get_or_compile(self.SOURCE, (), ARCH)
        cache.get_or_compile(self.SOURCE, (), ARCH)
        assert cache.stats().saved_seconds == 0  # the kernel was compiled by this cache
        with kcache.KernelCache(tmp_path / "cache") as other:
            for _ in range(3):
                other.get_or_compile(self.SOURCE, (), ARCH)
                other.clear_memory()
            assert other.stats().hits == 3
            assert other.stats().saved_seconds == first.compile_seconds


@pytest.mark.usefixtures("nvrtc")
class TestNotCached:
    """Requests that depend on more than the key are compiled every time, and counted."""

    def refuses(self, cache, source, options=ARCH, **arguments):
        for _ in range(2):
            kernel = cache.get_or_compile(source, (), options, **arguments)
            assert not kernel.cached
            assert kernel.cubin
        assert cache.stats().uncacheable == 2
        assert cache.entry_count == 0
        assert cache.lookup(source, (), options, **arguments) is None

    @pytest.mark.parametrize(
        "extra",
        [["-pch"], ["--create-pch=x.pch"]],
    )
    def test_precompiled_headers(self, cache, nvrtc, tmp_path, extra):
        if nvrtc < (12, 8):
            pytest.skip(f"NVRTC {nvrtc} has no precompiled headers")
        header = write(tmp_path / "inc/x.h", "#define V 1\n")
        options = ARCH.replace(include_paths=[tmp_path / "inc"], extra_options=extra)
        source = '#include "x.h"\n' + KERNEL
        with chdir(tmp_path):
            self.refuses(cache, source, options)
            header.write_text("#define V 2\n")
            assert not cache.get_or_compile(source, (), options).cached

    @pytest.mark.parametrize("option", ["--fdevice-time-trace=x", "--time=x"])
    def test_options_that_write_files(self, cache, tmp_path, nvrtc, option):
        if nvrtc < (13, 0):
            pytest.skip(f"NVRTC {nvrtc} does not support all of the options")
        options = ARCH.replace(extra_options=[option])
        with chdir(tmp_path):
            for _ in range(2):
                assert not cache.get_or_compile(SEVEN, (), options).cached
                written = [path for path in tmp_path.iterdir() if path.name.startswith("x")]
                assert written
                written[0].unlink()

    def test_optix_ir_alone(self, cache):
        options = ARCH.replace(extra_options=["--optix-ir"])
        for _ in range(2):
            assert not cache.get_or_compile(SEVEN, (), options).cached
        stats = cache.stats()
        assert (stats.uncacheable, stats.corrupt, cache.entry_count) == (2, 0, 0)


def test_no_arch_and_no_driver(cache):
    if find_library("cuda"):
        pytest.skip("needs a machine without a CUDA driver")
    for ask in (cache.get_or_compile, cache.lookup):
        for options in (None, CompileOptions(std=17)):
            with pytest.raises(
                kcache.ConfigError, match=r"no arch is given.*CompileOptions\(arch="
            ):
                ask("__global__ void k() {}", (), options)


# -- without a compiler ----------------------------------------------------------------------------


class TestValues:
    @pytest.mark.parametrize(
        ("given", "canonical"),
        [
            ("sm_90", "sm_90"),
            ("compute_90", "compute_90"),
            ("90", "sm_90"),
            (90, "sm_90"),
            ("90a", "sm_90a"),
            ("sm_100f", "sm_100f"),
            ("compute_120f", "compute_120f"),
        ],
    )
    def test_arch(self, given, canonical):
        assert CompileOptions(arch=given).arch == canonical
        assert parse_arch(given) == canonical
        assert CompileOptions(arch=given) == CompileOptions(arch=canonical)

    @pytest.mark.parametrize(
        "arch",
        ["", "sm_", "sm90", "sm_9", "SM_90", "sm_90b", "sm_90 ", "native", -90, 9000, True, 9.0],
    )
    def test_no_arch(self, arch):
        with pytest.raises(kcache.ConfigError, match="arch: expected"):
            CompileOptions(arch=arch)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("std", "c++"),
            ("std", "gnu++17"),
            ("optimization", 4),
            ("max_registers", 5000),
            ("defines", ["1X"]),
            ("defines", ["X=\0"]),
            ("include_paths", [""]),
            ("extra_options", ["-DX=\0"]),
        ],
    )
    def test_values_that_are_not_allowed(self, field, value):
        with pytest.raises(kcache.ConfigError, match=field):
            CompileOptions(arch=80, **{field: value})

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("lto", "yes"),
            ("lineinfo", 0),
            ("optimization", True),
            ("defines", "X=1"),
            ("include_paths", "inc"),
            ("extra_options", "-lineinfo"),
        ],
    )
    def test_types_that_are_not_allowed(self, field, value):
        with pytest.raises(ArgumentTypeError, match=field):
            CompileOptions(arch=80, **{field: value})

    def test_it_is_frozen_and_hashable(self):
        options = CompileOptions(arch=80, defines={"A": 1}, include_paths=["x"])
        with pytest.raises(AttributeError):
            options.arch = "sm_90"
        assert hash(options) == hash(
            CompileOptions(arch="sm_80", defines=["A=1"], include_paths=["x"])
        )
        assert options == CompileOptions(arch="sm_80", defines=["A=1"], include_paths=["x"])
        assert options.replace(arch=90) != options


class TestParsedOptions:
    @pytest.mark.parametrize(
        "options",
        [
            *(["-I", "\tinc"], ["-I=inc"], ["\n-Iinc\r"], ["-I\tinc"], ["-I =inc"], ["-I-"]),
            *(["-I=", "-Iinc"], ["--include-path", "inc"], ["-I", "-I"], ["-include-path=inc"]),
            *(["-Xcudafe", "-Iinc"], ["-D", "-Iinc"], ["\t-lineinfo"], ["--std", "c++17"]),
        ],
    )
    def test_the_compiler_reads_the_texts_that_are_made_of_it_alike(self, cache, tmp_path, options):
        write(tmp_path / "inc/x.h", "#define V 1\n")
        source = "#if __has_include(<x.h>)\n#include <x.h>\n#else\n#define V 2\n#endif\n" + KERNEL
        arch = "--gpu-architecture=compute_80"
        with chdir(tmp_path):
            given = compile_fresh(source, (arch, *options))
            parsed = parse_options(options)
            again = compile_fresh(source, (arch, *map(str, parsed)))
            assert (given.ptx, given.failed) == (again.ptx, again.failed)
            where = parsed.include_paths
            if "inc" in where:
                (tmp_path / "inc").rename(tmp_path / "elsewhere")
                moved = parsed.with_include_paths(["elsewhere"] * len(where))
                assert compile_fresh(source, (arch, *moved)).ptx == given.ptx


def test_an_architecture_as_pytorch_reports_it() -> None:
    assert CompileOptions(arch=(9, 0)) == CompileOptions(arch="sm_90")
    assert CompileOptions(arch=(10, 3)).arch == "sm_103"
    for wrong in ((9,), (9, 0, 0), (9, 12), ("9", "0"), (True, 0)):
        with pytest.raises(kcache.ConfigError, match="arch: expected"):
            CompileOptions(arch=wrong)  # type: ignore[arg-type]
