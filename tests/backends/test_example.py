"""The example of "Write a backend" can be built and installed, is found, and keeps the contract.

The page is docs/how-to/write-a-backend.md, the example kcache-sqlite.
"""

import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from core.helpers import output_of, run

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "kcache-sqlite"
BUILD = "import sys, hatchling.build as b; print(b.build_wheel(sys.argv[1]))"

FIND = """
import sys
from kcache import Entry, KernelCache, open_engine
from kcache.backend import backend_names
assert "sqlite" in backend_names(), backend_names()
key = "ab" * 32
with open_engine(sys.argv[1], backend="sqlite", max_size=10_000) as engine:
    for number in range(30):
        engine.put(f"{number:02}" * 32, Entry({"cubin": bytes(900)}))
    engine.put(key, Entry({"cubin": b"code"}))
    assert engine.size_bytes <= 10_000 and engine.stats().evictions
    assert engine.get(key).payload["cubin"] == b"code"
with KernelCache(sys.argv[1], backend="sqlite") as cache:
    assert cache.entry_count == len(list(cache.engine.backend.scan())) > 5
    print(type(cache.engine.backend).__name__)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the unpacked wheel of the example."""
    folder = tmp_path_factory.mktemp("example")
    source = shutil.copytree(
        EXAMPLE, folder / "source", ignore=shutil.ignore_patterns(".*", "__pycache__")
    )
    done = run(sys.executable, "-c", BUILD, folder, cwd=source)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(folder / done.stdout.split()[-1]) as wheel:
        assert {"kcache_sqlite.py"} == {n for n in wheel.namelist() if ".dist-info/" not in n}
        wheel.extractall(folder / "site")
    return folder / "site"


def test_it_is_found_by_its_name(installed: Path, tmp_path: Path) -> None:
    assert output_of(FIND, tmp_path, environ={"PYTHONPATH": str(installed)}) == "SqliteBackend"
    assert (tmp_path / "sqlite" / "entries.db").is_file()


def test_without_it_the_name_is_unknown(tmp_path: Path) -> None:
    code = """
import sys, kcache
try:
    kcache.open_engine(sys.argv[1], backend="sqlite")
except kcache.UnknownBackendError as error:
    print(error)
"""
    assert "sqlite" in output_of(code, tmp_path)


def test_it_keeps_the_contract(installed: Path, tmp_path: Path) -> None:
    """The example's own tests pass with pytest's defaults, outside of this repository."""
    shutil.copytree(EXAMPLE / "tests", tmp_path / "tests")
    words = ("-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "tests")
    environ = {"PYTHONPATH": str(installed)}
    done = run(sys.executable, *words, cwd=tmp_path, environ=environ)
    assert done.returncode == 0, done.stdout[-8000:]
    assert re.search(r"\b1\d passed", done.stdout), done.stdout
    # SQLite checks neither who owns a directory nor whether a stored value has grown.
    assert re.findall(r"\d+ skipped", done.stdout) == ["2 skipped"]
