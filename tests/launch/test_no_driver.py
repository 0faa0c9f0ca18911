"""Without a driver or cuda-core, loading raises an error that names it, at once and every time."""

import pytest
from core.helpers import output_of

import kcache
from kcache.errors import DeviceError
from kcache.util.cuda_driver import LIBRARY, open_library


def without_driver() -> None:
    try:
        open_library()
    except DeviceError as error:
        if LIBRARY not in str(error):
            pytest.skip(f"there is a driver: {error}")
        return
    pytest.skip("there is a driver")


TWICE = """
import sys
before = set(sys.modules)  # cuda-bindings 12 and editable installations load some at start
import kcache, kcache.launch
kernel = kcache.CompiledKernel(None, b"code", None, {}, "", "0" * 64, False, 0.0)
for ask in (kernel.load, kernel.load, kcache.launch.reset, kcache.launch.generation, kernel.load):
    try:
        ask()
    except kcache.DeviceError as error:
        print(type(error).__name__, error)
print([name for name in set(sys.modules) - before if name.split(".")[0] == "cuda"])
"""


def test_every_call_names_the_missing_driver_and_none_hangs() -> None:
    """Every call raises the error of the page load-and-launch.md at once, without hanging."""
    without_driver()
    *errors, loaded = output_of(TWICE).splitlines()
    said = f"DeviceError there is no CUDA driver: the library {LIBRARY} was not found"
    assert [error.startswith(said) for error in errors] == [True] * 5
    assert loaded == "[]"


def test_arguments_are_checked_before_the_driver_is_looked_for() -> None:
    kernel = kcache.CompiledKernel(None, b"code", None, {}, "", "0" * 64, False, 0.0)
    for device in ("0", 1.0, True):
        with pytest.raises(kcache.ConfigError, match="device: expected None or an integer"):
            kernel.load(device)  # type: ignore[arg-type]
    with pytest.raises(kcache.ConfigError, match="name: expected None or text, got 3"):
        kernel.load(name=3)  # type: ignore[arg-type]


def test_a_missing_cuda_core_names_the_extra() -> None:
    code = """
import sys
sys.modules["cuda.core"] = None  # as an import that fails
from kcache.errors import DeviceError
from kcache.launch import loaded_kernel
loaded_kernel.open_library = lambda: None  # there is a driver
core = loaded_kernel.core
try:
    core()
except DeviceError as error:
    print(error)
"""
    said = output_of(code)
    assert "cuda-core is missing" in said
    assert "[cu13,launch]'" in said
