"""NVIDIA's own tests of caches of programs, with `ProgramCache` in the place of theirs.

`TEST_CUDA_PYTHON` names a checkout of github.com/NVIDIA/cuda-python; nothing of it is kept here. By
hand, with the names of the tests that are left out:

    TEST_CUDA_PYTHON=~/cuda-python pytest -s tests/integrations/test_nvidia_cache.py
"""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from core.helpers import run

pytest.importorskip("cuda.core")

CHECKOUT = os.environ.get("TEST_CUDA_PYTHON")
FILES = ("test_program_cache", "test_program_cache_multiprocess", "test_program_compile_cache")
#: Every process imports this, also those that a test starts.
REPLACE = """
import cuda.core.utils
from kcache.integrations.cuda_core import ProgramCache

cuda.core.utils.FileStreamProgramCache = ProgramCache
"""
#: Tests of theirs that reach into private modules, or that look at the files of their cache. One
#: test loads what it compiled, so it needs a GPU.
CONFTEST = r"""
import inspect, re
import pytest
from cuda.core.utils import FileStreamProgramCache
from kcache.integrations.cuda_core import ProgramCache

assert FileStreamProgramCache is ProgramCache
PRIVATE = re.compile(r'_program_cache\b|[ (]cache\._|_os\b|"entries"|"tmp"|_RaceCache|get_kernel')


@pytest.fixture
def init_cuda():
    "Nothing is loaded here, so that no driver is needed."


def pytest_collection_modifyitems(config, items):
    left_out = []
    for item in items:
        text = inspect.getsource(item.function)
        if "_file_stream" in text or "FileStreamProgramCache" in text and PRIVATE.search(text):
            left_out.append(item)
    for item in left_out:
        items.remove(item)
        print("left out:", item.name)
    ours = ("FileStreamProgramCache" in inspect.getsource(item.function) for item in items)
    print("with kcache:", sum(ours) + sum("multiprocess" in str(item.path) for item in items))
    config.hook.pytest_deselected(items=left_out)
"""


@pytest.mark.skipif(CHECKOUT is None, reason="TEST_CUDA_PYTHON names no checkout")
def test_nvidias_tests_pass(tmp_path: Path) -> None:
    for name in FILES:
        shutil.copy(Path(str(CHECKOUT), "cuda_core", "tests", f"{name}.py"), tmp_path)
    (tmp_path / "sitecustomize.py").write_text(REPLACE)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    words = ("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-rs", ".")
    environ = {"PYTHONPATH": str(tmp_path)}
    done = run(sys.executable, *words, cwd=tmp_path, environ=environ)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    counted = re.search(r"with kcache: (\d+)", done.stdout)
    assert int(counted[1]) >= 20, done.stdout
