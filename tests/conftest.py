"""What every test shares: a clean environment, and what the machine may lack."""

import ctypes.util
import os
import signal
import site
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from hypothesis import settings
from nvrtc.edits import lay

import kcache

_CCCL = ("nvidia/cu13/include/cccl", "nvidia/cuda_cccl/include", "nvidia/cu12/include/cccl")


# Where there is a driver, NVRTC has a cache of its own: 12.9 and 13.0 return what they made with
# `--ftz=true` for the same source without. It would be no judge of what a compile gives.
os.environ.setdefault("CUDA_CACHE_DISABLE", "1")

# A run in the background of a shell may ignore Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _missing(reason: str) -> None:
    """Skip, unless the run was asked for with a compiler: then what is missing is a failure."""
    if os.environ.get("TEST_NVRTC_MAJOR"):
        pytest.fail(reason)
    pytest.skip(reason)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="the long versions of the tests of faults: an hour"
    )


# The same random examples in every run, so that a green run stays green; or others in each, and
# more of them, and a failure says how to repeat it.
settings.register_profile("same", derandomize=True, max_examples=40)
settings.register_profile("others", print_blob=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Have one worker more than cores: now and then a test waits."""
    return (os.cpu_count() or 1) + 1


def pytest_configure(config: pytest.Config) -> None:
    """Choose the random examples."""
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("others" if config.getoption("--long") else "same")


@pytest.fixture(scope="session")
def long(pytestconfig: pytest.Config) -> bool:
    """Whether the long version of a test is asked for."""
    return bool(pytestconfig.getoption("--long"))


@pytest.fixture(autouse=True)
def _clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KCACHE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / ".cache"))


@pytest.fixture(scope="session")
def nvrtc() -> tuple[int, int]:
    """NVRTC's version; skips where it is missing."""
    from kcache.errors import CompilerNotFoundError
    from kcache.nvrtc import compiler

    try:
        version = compiler.hello().version
    except CompilerNotFoundError as error:
        _missing(f"NVRTC is missing: {error}")
        raise
    major = os.environ.get("TEST_NVRTC_MAJOR")
    if major and version[0] != int(major):
        pytest.fail(f"TEST_NVRTC_MAJOR={major}, but the compiler found is {version}")
    return version


@pytest.fixture(scope="session")
def cccl() -> Path:
    """The include directory of CCCL, from its wheel; skips where it is missing."""
    for folder in dict.fromkeys((*sys.path, *site.getsitepackages())):
        for name in _CCCL:
            found = Path(folder, name)
            if (found / "cub").is_dir():
                return found
    _missing("the CCCL headers are missing: install the extra demo")
    raise AssertionError


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[kcache.KernelCache]:
    with kcache.KernelCache(tmp_path / "cache") as made:
        yield made


@pytest.fixture(scope="session")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all tests: a worker compiles for one working directory only."""
    return tmp_path_factory.mktemp("project") / "tree"


@pytest.fixture
def tree(top: Path) -> Iterator[Path]:
    """A project folder with nothing in it, which is the working directory."""
    top.mkdir(exist_ok=True)
    lay(top, {})
    with chdir(top):
        yield top


def _no_gpu() -> str | None:
    """Return why there is no GPU to use, or None; loading CUDA without a driver can hang."""
    name = ctypes.util.find_library("cuda")
    try:
        driver = ctypes.CDLL(name or "libcuda.so.1")
    except OSError:
        return "there is no CUDA driver (libcuda.so.1 is not found)"
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return "the CUDA driver can't be initialised"
    return None if count.value else "the CUDA driver finds no GPU"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for `--long` alone, and skip what needs a GPU where there is none."""
    if not config.getoption("--long"):
        left_out = {item for item in items if item.get_closest_marker("long")}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := _no_gpu()) is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
