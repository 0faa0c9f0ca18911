"""The caches that are compared: what each adapter promises, found out by using it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from contenders.contenders import (
    BY_NAME,
    CONTENDERS,
    FILE_STREAM,
    JAX,
    OURS,
    ROOMY,
    Contender,
    available,
    peers,
)
from contenders.population import key, value
from harness.findings import Fact
from harness.plan import KIB, QUICK

PAYLOAD = 4 * KIB


@pytest.fixture(params=BY_NAME)
def contender(request: pytest.FixtureRequest) -> Contender:
    found = BY_NAME[request.param]
    why = found.missing()
    if why is not None:
        pytest.skip(why)
    return found


def test_what_was_put_is_got(contender: Contender, tmp_path: Path) -> None:
    opened = contender.open(tmp_path / "it", ROOMY)
    assert opened.get(key(0)) is None
    for number in range(3):
        opened.put(key(number), value(number, 100 * KIB))
    assert [opened.get(key(number)) for number in range(3)] == [
        value(number, 100 * KIB) for number in range(3)
    ]
    opened.close()


def test_it_outlives_its_process_if_it_says_so(contender: Contender, tmp_path: Path) -> None:
    opened = contender.open(tmp_path / "it", ROOMY)
    opened.put(key(0), value(0, PAYLOAD))
    opened.close()
    code = (
        f"import sys; sys.path[:0] = {[path for path in sys.path if path]!r}\n"
        "from pathlib import Path\nfrom contenders.contenders import BY_NAME\n"
        f"found = BY_NAME[{contender.name!r}].open(Path({str(tmp_path / 'it')!r}), {ROOMY}).get({key(0)!r})\n"
        "print(len(found or b''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # The memory tier is above files, which do outlive it.
    assert int(done.stdout) == (PAYLOAD if contender.on_disk or contender.role == OURS else 0)


def test_the_cap_is_kept_and_the_oldest_go_first(contender: Contender, tmp_path: Path) -> None:
    payload, fitting = 100 * KIB, 20
    opened = contender.open(tmp_path / "it", fitting * payload)
    for number in range(2 * fitting):
        opened.put(key(number), value(number, payload))
    there = [number for number in range(2 * fitting) if opened.get(key(number)) is not None]
    # kcache trims to nine tenths, LMDB counts pages, diskcache evicts ten at a time.
    assert fitting // 3 <= len(there) <= fitting
    assert there == list(range(2 * fitting))[-len(there) :]
    held = opened.used()
    assert held is None or held <= fitting * payload + 64 * KIB
    opened.close()


def test_a_get_is_a_use(contender: Contender, tmp_path: Path) -> None:
    if contender.name == "kcache memory":
        pytest.skip("it records a use of the backend's entry once a minute only")
    payload, fitting = 100 * KIB, 20
    opened = contender.open(tmp_path / "it", fitting * payload)
    for number in range(2 * fitting):
        opened.put(key(number), value(number, payload))
        assert opened.get(key(0)) == value(0, payload)
    opened.close()


def test_what_a_put_forces_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those written in Python, so that it can be seen: cuda.core does, kcache's files do not."""
    calls: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(fd), fsync(fd))[1])
    found = {}
    for name in ("kcache `file`", FILE_STREAM, JAX):
        contender = BY_NAME[name]
        if contender.missing() is None:
            opened = contender.open(tmp_path / name, ROOMY)
            calls.clear()
            opened.put(key(0), value(0, PAYLOAD))
            opened.close()
            found[name] = (len(calls), contender.syncs)
    assert found["kcache `file`"] == (0, "nothing")
    assert found.get(JAX, (0, "nothing")) == (0, "nothing")
    assert found.get(FILE_STREAM, (1, "each value")) == (1, "each value")


def test_a_peer_that_cannot_be_imported_is_named_with_the_reason(tmp_path: Path) -> None:
    made_up = Contender(
        "made up", "peer", CONTENDERS[0].open, ("no_such_module_at_all",), *[""] * 5
    )
    there, absent = available("sizes", (CONTENDERS[0], made_up))
    (one,) = absent
    assert there == [CONTENDERS[0]]
    assert one.who == "made up"
    assert one.reason == "ModuleNotFoundError: No module named 'no_such_module_at_all'"


def test_the_table_of_peers_says_something_of_each_and_has_no_target(tmp_path: Path) -> None:
    there, _ = available("peers", CONTENDERS)
    facts = [found for found in peers(QUICK, tmp_path) if isinstance(found, Fact)]
    assert {fact.figure.rpartition(": ")[2] for fact in facts} == {each.name for each in there}
    assert len(facts) == 5 * len(there)
    assert all(fact.found for fact in facts)
    assert {fact.target for fact in facts} == {""}
