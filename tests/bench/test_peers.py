"""The caches that are compared: what each adapter promises, found out by using it."""

from __future__ import annotations

from pathlib import Path

import pytest
from contenders.contenders import (
    BY_NAME,
    CONTENDERS,
    ROOMY,
    Contender,
    available,
)
from contenders.population import key, value
from harness.plan import KIB

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


def test_a_peer_that_cannot_be_imported_is_named_with_the_reason(tmp_path: Path) -> None:
    made_up = Contender("made up", "peer", CONTENDERS[0].open, ("no_such_module_at_all",))
    there, absent = available("sizes", (CONTENDERS[0], made_up))
    (one,) = absent
    assert there == [CONTENDERS[0]]
    assert one.who == "made up"
    assert one.reason == "ModuleNotFoundError: No module named 'no_such_module_at_all'"
