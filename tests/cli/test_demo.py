"""`kcache demo`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("nvrtc")


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
        headers = re.search(r"\nheaders +(\d+) read +(\d+) verified\n", text)
        assert headers is not None
        assert int(headers[1]) == int(headers[2]) > 100
        assert len(re.findall(r"\n(?:CUBIN|PTX) +\S+ [KM]iB +same bytes\n", text)) >= 1
    assert list(temporary.iterdir()) == []
    assert not cache_directory.exists()


def test_a_target_that_is_not_known_is_one_line(run: Callable, cccl: Path) -> None:
    done = run("demo", "--arch", "sm_999")
    assert done.returncode == 2
    assert done.stderr.startswith(b"kcache: error: arch='sm_999' is not known")
    assert done.stderr.count(b"\n") == 1
