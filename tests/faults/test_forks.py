"""Forks beside imports of another thread, and children that exit: neither side harms the other."""

from __future__ import annotations

from pathlib import Path

import pytest
from core.helpers import output_of
from faults.places import NAMES

SLOW = """
import os, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
from kcache.util import forks
forks.PATIENCE = float(sys.argv[2])
begun = threading.Event()
def load():
    begun.set()
    import slow_package.slow
thread = threading.Thread(target=load)
thread.start()
begun.wait()
while "slow_package.slow" not in sys.modules:
    time.sleep(0.001)
pid = os.fork()
if not pid:
    signal.alarm(20)
    import slow_package.slow
    os._exit(0 if slow_package.slow.READY else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
thread.join()
print("well")
"""


@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_a_child_can_import_what_another_thread_was_importing(
    patience: float, tmp_path: Path
) -> None:
    """By waiting before the fork, and, where that takes too long, by importing it anew."""
    package = tmp_path / "slow_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "slow.py").write_text("import time\ntime.sleep(0.5)\nREADY = True\n")
    assert output_of(SLOW, str(tmp_path), str(patience)) == "well"


FIRST = """
import os, signal, sys, threading, time
from kcache import KernelCache, CompileOptions, Entry
place, delay = sys.argv[1], float(sys.argv[2])
entry = Entry({"a": b"x" * 100})
def use(number):
    with KernelCache(place) as cache:
        for n in range(3):
            key = f"{number:02x}{n:062x}"
            assert cache.engine.get_or_create(key, lambda: entry) == entry
            cache.engine.delete(key)
            cache.lookup(f"#include <x.h>\\n// {n}", (), CompileOptions(arch="sm_80"))
        cache.total_stats()
        cache.print_info(open(os.devnull, "w"))
thread = threading.Thread(target=use, args=(0,))
thread.start()
time.sleep(delay)
children = []
for number in range(1, 6):
    pid = os.fork()
    if not pid:
        signal.alarm(30)
        use(number)
        os._exit(0)
    children.append(pid)
for pid in children:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
thread.join()
print("well")
"""


def test_forks_beside_the_first_use_leave_no_child_waiting(tmp_path: Path, long: bool) -> None:
    """7 of 80 children waited for ever, within 120 ms of the parent's first use."""
    runs = 80 if long else 3
    for run in range(runs):
        assert output_of(FIRST, str(tmp_path / "cache"), str(0.12 * run / runs)) == "well"


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


@pytest.mark.parametrize("name", NAMES)
def test_a_child_that_exits_cleanly_takes_nothing_from_its_parent(
    name: str, tmp_path: Path
) -> None:
    output_of(EXITS, str(tmp_path), name)
