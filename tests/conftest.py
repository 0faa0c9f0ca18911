"""Fixtures of all tests: a clean environment, and skips for what a machine may lack."""

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


# If there is a driver, NVRTC uses a cache of its own. In 12.9 and 13.0, it can return the result of
# a compile with `--ftz=true` for the same source without that option. Then the tests could not
# decide whether kcache's result is right.
os.environ.setdefault("CUDA_CACHE_DISABLE", "1")

# A shell may start a run in the background with Ctrl-C ignored. Then every process that a test
# starts would ignore it, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _missing(reason: str) -> None:
    """Skip the test, or fail it if `TEST_NVRTC_MAJOR` says that the run needs NVRTC."""
    if os.environ.get("TEST_NVRTC_MAJOR"):
        pytest.fail(reason)
    pytest.skip(reason)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="the long versions of the tests of faults: an hour"
    )


# `same` has the same random examples in every run, so that a green run stays green. `others` has
# other and more examples in every run, and a failure prints how to repeat it.
settings.register_profile("same", derandomize=True, max_examples=40)
settings.register_profile("others", print_blob=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one more than the number of cores, because some tests wait and leave a core idle."""
    return (os.cpu_count() or 1) + 1


def pytest_configure(config: pytest.Config) -> None:
    """Load the profile of Hypothesis that decides about the random examples."""
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("others" if config.getoption("--long") else "same")


@pytest.fixture(scope="session")
def long(pytestconfig: pytest.Config) -> bool:
    """Whether the option `--long` was given."""
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
    """NVRTC's version. The test is skipped if NVRTC is not installed."""
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
    """The include directory of CCCL in its wheel. The test is skipped if it is not installed."""
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
    """One folder for all tests, because a worker compiles for a single working directory."""
    return tmp_path_factory.mktemp("project") / "tree"


@pytest.fixture
def tree(top: Path) -> Iterator[Path]:
    """An empty project folder, which is the working directory during the test."""
    top.mkdir(exist_ok=True)
    lay(top, {})
    with chdir(top):
        yield top


def _no_gpu() -> str | None:
    """Return why no GPU can be used, or None if one can.

    This asks the driver itself, because importing a CUDA package without a driver can hang.
    """
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
    """Leave out tests marked `long` without `--long`; skip those marked `gpu` without a GPU."""
    if not config.getoption("--long"):
        left_out = {item for item in items if item.get_closest_marker("long")}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := _no_gpu()) is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
