"""Packages that are not installed: the message names the package and the extra."""

from __future__ import annotations

import sys

import pytest

from kcache.errors import ConfigError
from kcache.remote.address import parse_addresses
from kcache.remote.remote_client import open_client


@pytest.mark.parametrize(
    ("address", "package", "module", "extra"),
    [
        ("https://user:hunter2@localhost", "urllib3", "kcache.remote.http", "http"),
        ("redis://user:hunter2@localhost", "redis", "kcache.remote.redis", "redis"),
        ("s3://bucket", "obstore", "kcache.remote.objects", "s3"),
    ],
)
def test_the_message_names_the_extra(
    address: str, package: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n == module or n.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    (parsed,) = parse_addresses(address, name="remote")
    with pytest.raises(ConfigError) as caught:
        open_client(parsed)
    assert f"pip install {package}" in str(caught.value)
    assert f"the extra {extra}" in str(caught.value)
    assert "hunter2" not in str(caught.value)
