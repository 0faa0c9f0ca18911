"""The chapter about remotes, on little: what it yields with servers, and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from chapters import remote_gets
from harness.findings import Absent, Ratio, Timing
from harness.plan import QUICK
from remote import servers


def test_it_compares_with_the_bare_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("redis", reason="the package redis is missing")
    servers.program("redis-server", "redis-server")
    servers.program("nginx", "nginx")
    monkeypatch.setattr(remote_gets, "LOOPS", 3)
    found = list(remote_gets.remotes(replace(QUICK, calls=2), tmp_path))
    assert not [each for each in found if isinstance(each, Absent)]
    ratios = {each.figure for each in found if isinstance(each, Ratio)}
    for name in ("Redis", "HTTP"):
        assert f"get of 100 KiB by {name}, {remote_gets.HIT}" in ratios
    rows = {each.row for each in found if isinstance(each, Timing)}
    assert rows >= {remote_gets.BARE, "unsigned", remote_gets.HIT}


def test_without_servers_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = list(remote_gets.remotes(QUICK, tmp_path))
    assert [type(each) for each in found] == [Absent, Absent]
