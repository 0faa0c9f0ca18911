"""Interleaves the contenders of a group, and prints the ratios of their times to kcache's.

Other work on a machine slows down the benchmark that runs at the same time. So each benchmark runs
in several laps (`--laps`): all contenders of a group run once, then all of them run again in
reverse order, and so on. The laps of a benchmark become one row of pytest-benchmark's table and
JSON. The ratio of two rows is the median of the ratios of their laps.

    @pytest.mark.beside("get of {size} bytes", "{contender}")

puts a benchmark into a group and names its row. `pytest.ini` describes the marks `laps` and
`target`.
"""

import os
import shlex
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import ratios
from keep import Keep

#: The JSON has the versions of the distributions whose names begin with one of these.
PACKAGES = ("cuda", "cupy", "diskcache", "jax", "kcache", "lmdb", "nvidia", "triton", "zstandard")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("benchmark")
    group.addoption("--laps", type=int, default=5, help="how often each group runs; 5 by default")
    group.addoption("--kernel", type=Path, help="a CUDA file to measure beside bench/kernels/")
    group.addoption("--kernel-name", action="append", default=[], help="a name expression for it")
    group.addoption("--kernel-option", action="append", default=[], help="an NVRTC option for it")


# -- laps ------------------------------------------------------------------------------------------


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    mark = metafunc.definition.get_closest_marker("laps")
    count = min(option("--laps"), mark.args[0] if mark else sys.maxsize)
    numbers = range(1 if option("benchmark_disable") else count)
    metafunc.parametrize("lap", numbers, indirect=True, ids=[f"lap{n}" for n in numbers])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order: dict[tuple[Path, str], int] = {}
    keys = {}
    for number, item in enumerate(items):
        params = dict(item.callspec.params)  # type: ignore[attr-defined]
        lap = params.pop("lap")
        group, row = (text.format(**params) for text in item.get_closest_marker("beside").args)  # type: ignore[union-attr]
        given = item.get_closest_marker("benchmark")
        options = {**(given.kwargs if given else {}), "group": group}
        item.add_marker(pytest.mark.benchmark(**options), append=False)
        targets = [
            dict(zip(("to", "most", "less"), (*mark.args[1:], None), strict=False))
            for mark in item.iter_markers("target")
            if mark.args[0] == row
        ]
        item.stash[INFO] = {"row": row, "lap": lap, "targets": targets}
        place = order.setdefault((item.path, group), number)
        keys[item] = (place, lap, number if lap % 2 == 0 else -number)
    items.sort(key=keys.__getitem__)


INFO = pytest.StashKey[dict[str, Any]]()


@pytest.fixture(autouse=True)
def lap(request: pytest.FixtureRequest, benchmark: Any) -> int:
    benchmark.extra_info |= request.node.stash[INFO]
    number: int = request.param
    return number


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Merge the laps of each benchmark into one row, before pytest-benchmark prints the rows."""
    found = measured(session.config)
    rows: dict[str, Any] = {}
    for each in found:
        number = str(each.extra_info.pop("lap"))
        each.params = {name: value for name, value in each.params.items() if name != "lap"}
        for field in ("name", "fullname", "param"):
            text = getattr(each, field).replace(f"-lap{number}", "").replace(f"lap{number}", "")
            setattr(each, field, text.replace("[]", ""))
        row = rows.setdefault(each.fullname, each)
        row.extra_info.setdefault("laps", {})[number] = median(each.stats.data)
        if row is not each:
            row.stats.data += each.stats.data
            row.extra_info = {**each.extra_info, **row.extra_info}
    found[:] = rows.values()
    return (yield)


def measured(config: pytest.Config) -> list[Any]:
    """Return pytest-benchmark's own list of measurements, after removing the failed ones."""
    session = config.pluginmanager.get_plugin("pytest-benchmark")
    session.benchmarks[:] = [each for each in session.benchmarks if each and not each.has_error]
    found: list[Any] = session.benchmarks
    return found


# -- what is printed and kept ----------------------------------------------------------------------


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = ratios.groups(
        each.as_dict(include_data=False) for each in measured(terminalreporter.config)
    )
    if not found:
        return
    write = terminalreporter.write_line
    terminalreporter.section("ratios to kcache: median of the laps, and quartiles")
    for name, group in found.items():
        first = ratios.reference(group)
        write(name, bold=True)
        for row, benchmark in group.items():
            info, ratio = benchmark["extra_info"], ratios.ratio(benchmark, group[first])
            if "found" in info:
                wrong = row.startswith("kcache") and not info["right"]
                write(f"    {row:<52} {info['found']}{'  WRONG' if wrong else ''}", red=wrong)
            elif ratio:
                low, high = map(ratios.times, ratio[1:])
                write(f"    {row:<52} {ratios.times(ratio.median):>8}   {low} to {high}")
    terminalreporter.section("targets")
    for each in ratios.targets(found):
        low, high = map(ratios.times, each.ratio[1:])
        text = f"{each.group}: {each.row}, to {each.to}: {ratios.times(each.ratio.median)}"
        limit = f"({low} to {high}), at most {ratios.times(each.most)}"
        write(f"{'met   ' if each.met else 'MISSED'} {text} {limit}", red=not each.met)


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """Keep only what the figures depend on, so that the JSON has no name of the machine."""
    cpu = machine_info["cpu"]
    versions = {
        each.name: each.version for each in distributions() if each.name.startswith(PACKAGES)
    }
    kept = {
        "cpu": cpu.get("brand_raw", ""),
        "cores": os.cpu_count(),
        "system": f"{machine_info['system']} {machine_info['release']} {machine_info['machine']}",
        "python": machine_info["python_version"],
        "versions": {**dict(sorted(versions.items())), "SQLite": sqlite3.sqlite_version},
    }
    machine_info.clear()
    machine_info.update(kept)


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    given = [word for word in config.invocation_params.args if "json" not in str(word)]
    output_json["command"] = shlex.join(["pytest", *map(str, given)])


# -- what benchmarks share -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keep() -> Iterator[Keep]:
    with Keep() as made:
        yield made


@pytest.fixture(scope="session", autouse=True)
def _environment() -> Iterator[None]:
    """Measure kcache without settings and with its own folders, and turn NVRTC's own cache off."""
    with tempfile.TemporaryDirectory(prefix="kb-") as home, pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("KCACHE_", "PYTHON")):
                patch.delenv(name)
        for name in ("XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "HOME"):
            patch.setenv(name, home)
        patch.setenv("CUDA_CACHE_DISABLE", "1")
        yield
