"""`kcache demo`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kcache.cli.commands import demo

pytestmark = pytest.mark.usefixtures("nvrtc")

#: Prints the modules that getting the kernel imports, beyond what `measure` imports before.
IMPORTS = """import sys
from types import SimpleNamespace
from kcache.cli import demo_process
seen = []
def perf_counter():
    seen.append(set(sys.modules))
    return float(len(seen))
demo_process.time = SimpleNamespace(perf_counter=perf_counter)
assert demo_process.measure(sys.argv[1], "sm_90", sys.argv[2], recache=False)["cached"]
print(*(seen[1] - seen[0]))
"""


@pytest.mark.slow
def test_compiles_in_one_process_and_hits_in_the_next(
    run: Callable, cccl: Path, tmp_path: Path, cache_directory: Path
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    kept = tmp_path / "kept"
    line = ["demo", "--arch", "sm_90", "--directory", kept]
    for _ in range(2):  # it compiles, whatever is in the cache
        done = run(
            *line, TMPDIR=str(temporary), COLUMNS="60", KCACHE_DISABLE="1", KCACHE_ON_MISS="error"
        )
        assert (done.returncode, done.stderr) == (0, b"")
        text = done.stdout.decode()
        assert re.search(r"\n *process 1 +process 2", text)
        assert re.search(r"\nkernel +\d+\.\d (m?s) +\d+\.\d (us|ms) +[\d,]+ times\n", text)
        assert re.search(r"\nasked again +\d+\.\d (us|ms) +[\d,]+ times\n", text)
        assert re.search(r"\nwhole process +\d+\.\d (m?s) +\d+\.\d m?s +[\d,]+ times\n", text)
        headers = re.search(r"\nheaders +(\d+) read +(\d+) verified\n", text)
        assert headers is not None
        assert int(headers[1]) == int(headers[2]) > 100
        assert re.search(r"\ncompiler +in a worker +not loaded\n", text)
        assert len(re.findall(r"\n(?:CUBIN|PTX) +\S+ [KM]iB +same bytes\n", text)) >= 1
        assert max(map(len, text.splitlines()[:-3])) <= 60
        assert "\x1b" not in text
    assert list(temporary.iterdir()) == []
    assert not cache_directory.exists()

    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORTS, kept, cccl],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")


def test_without_the_headers_it_names_the_extra(
    here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "folder_of", lambda _: None)
    said = here("demo")
    assert (said.code, said.out) == (2, "")
    assert "[demo]'" in said.err
    assert said.err.count("\n") == 1


def test_a_target_that_is_not_known_is_one_line(run: Callable, cccl: Path) -> None:
    done = run("demo", "--arch", "sm_999")
    assert done.returncode == 2
    assert done.stderr.startswith(b"kcache: error: arch='sm_999' is not known")
    assert done.stderr.count(b"\n") == 1
