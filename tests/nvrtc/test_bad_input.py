"""Bad input and bad places: a clear error, or still the right kernel."""

import os
from pathlib import Path

import pytest
from core.helpers import output_of
from nvrtc.reference import ARCH, KERNEL, agreed

import kcache
from kcache.errors import ArgumentTypeError, CompileOptionError

SEVEN = KERNEL.replace("V", "7")

if os.name == "nt":
    pytest.skip("needs POSIX permissions", allow_module_level=True)


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "error", "says"),
    [
        *((text, kcache.ConfigError, "source is empty") for text in ("", " ", "\n\t\r\n")),
        *((wrong, ArgumentTypeError, "source: expected text") for wrong in (None, b"x", 3, ["x"])),
        # The compiler would stop reading there, and silently compile the first part.
        (SEVEN + "\0 nonsense", kcache.ConfigError, "NUL character at position 53"),
        (SEVEN + "// \udcff", kcache.ConfigError, "surrogate"),
    ],
)
def test_an_invalid_source_is_refused(cache, source, error, says):
    for ask in (cache.get_or_compile, cache.lookup):
        with pytest.raises(error, match=says):
            ask(source, (), ARCH)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"names": 3}, "names"),
        ({"names": [3]}, "name expression"),
        ({"names": ["a", ""]}, "names: expected name expressions such as axpy<float>, got ''"),
        ({"names": ["-use_fast_math"]}, "got '-use_fast_math', which looks like an option"),
        ({"names": "a\0b"}, "NUL"),
        ({"names": b"a"}, "names"),
        ({"names": {"a"}}, "names"),
        ({"names": ARCH}, "names: expected name expressions, got CompileOptions"),
        ({"options": {"arch": 80}}, "options: expected kcache.CompileOptions, got dict"),
        ({"options": "sm_80"}, "CompileOptions"),
        ({"headers": ["x.h"]}, "headers"),
        ({"headers": {"x.h": b""}}, "headers"),
        ({"headers": {3: ""}}, "headers"),
        ({"headers": {"x.h": "\0"}}, "NUL"),
        ({"extra_key": "text"}, "extra_key"),
        ({"source_name": ""}, "source_name"),
        ({"source_name": Path("kernel.cu")}, "source_name"),
        ({"source_name": "a\0b"}, "NUL"),
    ],
)
def test_arguments_of_the_wrong_kind(cache, arguments, says):
    arguments = {"names": (), "options": ARCH, **arguments}
    for ask in (cache.get_or_compile, cache.lookup):
        for _ in range(2):  # the second call fails like the first one
            with pytest.raises(kcache.ConfigError, match=says):
                ask(SEVEN, **arguments)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ["sm_99", "compute_55", "sm_80f"])
def test_an_arch_that_the_compiler_does_not_know(cache, arch):
    with pytest.raises(CompileOptionError) as caught:
        cache.get_or_compile(SEVEN, (), ARCH.replace(arch=arch))
    assert arch in str(caught.value)
    assert isinstance(caught.value, kcache.ConfigError)
    assert cache.entry_count == 0


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("extra", [["--no-such-option"], [""], ["x"], ["-O3"]])
def test_an_option_that_the_compiler_does_not_know(cache, extra):
    with pytest.raises(kcache.CompileError) as caught:
        cache.get_or_compile(SEVEN, (), ARCH.replace(extra_options=extra))
    assert extra[0] in str(caught.value)
    assert cache.entry_count == 0


def test_the_bindings_are_not_installed(tmp_path, nvrtc):
    """The bindings are needed to launch kernels, but not to compile them."""
    code = """
    import sys
    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name == "cuda" or name.startswith("cuda."):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.meta_path.insert(0, Missing())
    for name in [name for name in sys.modules if name.partition(".")[0] == "cuda"]:
        del sys.modules[name]
    import kcache
    cache = kcache.KernelCache(sys.argv[1])
    options = kcache.CompileOptions(arch=80)
    print(bool(cache.get_or_compile("__global__ void k() {}", (), options).cubin))
    """
    assert output_of(code, tmp_path / "c").strip() == "True"


def test_the_library_is_not_installed(tmp_path, nvrtc):
    code = """
    import os, site, sys
    site.getsitepackages = lambda: [sys.argv[1]]
    site.ENABLE_USER_SITE = False
    for name in ("LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX"):
        os.environ.pop(name, None)
    import kcache
    try:
        kcache.KernelCache(sys.argv[1]).get_or_compile(
            "__global__ void k() {}", (), kcache.CompileOptions(arch=80))
    except kcache.KcacheError as error:
        print(type(error).__name__, isinstance(error, ImportError), error)
    """
    said = output_of(code, tmp_path / "c")
    if not said:
        pytest.skip("NVRTC is installed outside of Python")
    assert said.startswith("CompilerNotFoundError True")
    assert "[cu13]' (CUDA 12: cu12)" in said


# -- headers and paths -----------------------------------------------------------------------------


@pytest.mark.usefixtures("nvrtc")
class TestHeaders:
    def test_a_header_that_is_not_utf8_is_cached(self, cache, tmp_path):
        header = tmp_path / "inc/x.h"
        header.parent.mkdir()
        options = ARCH.replace(include_paths=[tmp_path / "inc"])
        source = "#include <x.h>\n" + KERNEL
        for content in (
            b"// \xff\xfe\n#define V 1\n",
            b"// \xff\xff\n#define V 1\n",
            b"#define V 2\n",
        ):
            header.write_bytes(content)
            assert not agreed(cache, source, options).cached
            assert agreed(cache, source, options).cached

    def test_the_working_directory_is_gone(self, tmp_path):
        code = """
        import os, sys
        from pathlib import Path
        from nvrtc.reference import *
        tree = Path(sys.argv[1])
        gone = tree / "gone"
        gone.mkdir()
        write(tree / "inc/x.h", "#define V 1\\n")
        os.chdir(gone)
        gone.rmdir()
        cache = kcache.KernelCache(tree / "cache")
        options = ARCH.replace(include_paths=[tree / "inc"])
        for source in (KERNEL.replace("V", "7"), "#include <x.h>\\n" + KERNEL):
            for change in ({}, {"lineinfo": True}):
                kernel = cache.get_or_compile(source, (), options.replace(**change))
                assert kernel.cubin == compile_fresh(source, options.replace(**change).flags()).cubin
        write(tree / "inc/x.h", "#define V 2\\n")
        agreed(cache, "#include <x.h>\\n" + KERNEL, options)
        """
        output_of(code, tmp_path)
