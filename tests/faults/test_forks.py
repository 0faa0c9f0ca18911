"""Forks in mid-use: parent and child both go on, and neither harms the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from core.helpers import entry, fork, key, wait
from faults.places import NAMES

from kcache import open_engine

pytestmark = pytest.mark.parametrize("name", NAMES)


def test_a_child_that_lets_go_takes_nothing_from_its_parent(name: str, tmp_path: Path) -> None:
    with open_engine(tmp_path, backend=name) as engine:
        engine.put(key(1), entry())

        def use() -> None:
            assert engine.get(key(1)) == entry()
            assert engine.put(key(2), entry())
            assert engine.delete(key(2))

        for work in (lambda: None, use, engine.close):
            assert engine.get(key(1)) == entry()
            assert wait(fork(work)) == 0
            assert engine.backend.usage().entries == 1
            assert engine.get(key(1)) == entry()
        assert engine.stats().errors == 0


EXITS = """
import os, sys
from kcache import Entry, open_engine
with open_engine(sys.argv[1], backend=sys.argv[2]) as engine:
    engine.put("1" * 64, Entry({"a": b"1"}, {}))
    assert engine.get("1" * 64)
    engine.backend.usage()
    pid = os.fork()
    if not pid:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert engine.backend.usage().entries == 1
    assert engine.get("1" * 64)
    assert engine.stats().errors == 0
"""


def test_a_child_that_exits_cleanly_takes_nothing_from_its_parent(
    name: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXITS, str(tmp_path), name],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert os.path.isdir(tmp_path / name)
