"""The interface library under the sanitizers of the C compiler, with many threads and forks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from dropin.conftest import CLIENTS, Dropin

from kcache.dropin import build

#: The sanitizers' runtimes want to be the first library; a preloaded one that needs them comes first.
_QUIET = {
    "ASAN_OPTIONS": "verify_asan_link_order=0:detect_leaks=1",
    "UBSAN_OPTIONS": "halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:die_after_fork=0",
}


@pytest.mark.parametrize(
    ("sanitizer", "forks"),
    [("address,undefined", True), ("thread", False)],  # TSan gives up on forks of threads
)
def test_threads(sanitizer: str, forks: bool, real: Path, dropin: Dropin, tmp_path: Path) -> None:
    compiler = build.compiler()
    assert compiler is not None
    flags = [f"-fsanitize={sanitizer}", "-g", "-fno-omit-frame-pointer"]
    program = tmp_path / "threads"
    command = [compiler, *flags, CLIENTS / "threads.c", "-o", program, "-ldl", "-lpthread"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    trial = subprocess.run([program, "/nonexistent"], capture_output=True, text=True, check=False)
    if made.returncode != 0 or "line " not in trial.stderr:
        pytest.skip(f"no -fsanitize={sanitizer} here: {made.stderr or trial.stderr}")
    folder = tmp_path / "sanitized"
    build.build(str(folder), flags=flags)
    told = dropin.run(
        program,
        real,
        **_QUIET,
        KCACHE_DROPIN_LIBRARIES=str(folder),
        **({"FORKS": "1"} if forks else {}),
    )
    assert (told.code, told.output) == (0, "done\n"), told.errors
    assert "Sanitizer" not in told.errors
    assert "runtime error" not in told.errors
    assert told.misses == 6
    assert "left to NVRTC 0" in told.line
