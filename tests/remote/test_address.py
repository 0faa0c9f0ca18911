"""Addresses of remotes: what is allowed, what it means, and that credentials are never shown."""

import sys

import pytest

from kcache.errors import ConfigError
from kcache.remote.address import Address, parse_addresses
from kcache.remote.storage import open_storage


def one(text: str) -> Address:
    (address,) = parse_addresses(text, name="KCACHE_REMOTE")
    return address


@pytest.mark.parametrize(
    ("text", "kind", "hosts", "path"),
    [
        ("file:///opt/kernels?ro", "layer", "", "/opt/kernels"),
        ("file:///opt/a%20b.kcb", "layer", "", "/opt/a b.kcb"),
        ("https://cache.example/kcache/", "http", "cache.example", "kcache"),
        ("http://[::1]:8080", "http", "[::1]:8080", ""),
        ("redis://localhost", "redis", "localhost", ""),
        ("REDISS://h:6380/2", "redis", "h:6380", "2"),
        ("redis+cluster://a:1,b:2", "redis", "a:1,b:2", ""),
        ("valkey://h", "redis", "h", ""),
        ("s3://bucket/some/prefix", "objects", "bucket", "some/prefix"),
        ("gs://bucket", "objects", "bucket", ""),
        ("az://container/x", "objects", "container", "x"),
    ],
)
def test_the_parts_of_an_address(text: str, kind: str, hosts: str, path: str) -> None:
    address = one(text)
    assert (address.kind, address.hosts, address.path) == (kind, hosts, path)
    assert address.writable == (kind != "layer")


def test_several_in_order_each_once() -> None:
    text = " file:///opt/k?ro, redis+cluster://a:1,b:2?ro\nhttps://h/x,https://h/x,"
    found = parse_addresses(text, name="remote")
    assert [a.redacted() for a in found] == [
        "file:///opt/k",
        "redis+cluster://a:1,b:2?ro",
        "https://h/x",
    ]
    assert parse_addresses(["file:///opt/k", "https://h/x?ro"], name="x")[1].path == "x"
    assert parse_addresses(found, name="remote") == found
    assert parse_addresses("", name="remote") == ()


def test_options() -> None:
    address = one(
        "redis://h?rw&keep=0&connect_timeout=.25&timeout=3&max_entry=1MiB&expire=60&leases=1"
    )
    assert address.writable
    assert not address.keep
    assert (address.connect_timeout, address.timeout) == (0.25, 3.0)
    assert address.max_entry == 1 << 20
    assert address.option("expire") == "60"
    assert address.flag("leases")
    assert not one("redis://h").flag("leases")
    assert not one("https://h?ro").writable


def test_credentials_are_not_shown() -> None:
    address = one("redis://me:pass%40word@h/0")
    assert (address.user, address.password) == ("me", "pass@word")
    for shown in (repr(address), str(address), f"{address}", address.redacted(), repr([address])):
        assert "me" not in shown
        assert "pass" not in shown
        assert "***@h/0" in shown


INVALID = """
ftp://h localhost:6379 /opt/kernels file://opt/kernels file:///opt?rw redis:// https:///x
https://h?ro&rw https://h?unknown=1 redis://h?expire=1&timeout=no redis://h?timeout=0
redis://h?max_entry=0 redis://h?leases=1&lease_seconds=0 redis://h?leases=1&lease_seconds=3601
http://h?timeout=1e5 redis://h?lease_seconds=soon redis://h:0 redis://h:banana redis://a,b
https://h?token_file=here https://h/#x s3://me:hidden@bucket redis://h:65536
redis+cluster://a:1,b:99999 redis://h?leases=maybe s3://b?anonymous=maybe s3://b?virtual_hosted=x
"""


@pytest.mark.parametrize("text", INVALID.split())
def test_invalid_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="KCACHE_REMOTE") as caught:
        one(text)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "redis://u:hidden@h:x",
        "https://u:hidden@h?x=hidden",
        "redis://:hid?den@h/0",
        "redis://me:12?hidden@h/0",
        "redis://me:12?timeout=hidden@h",
        "redis://me:12?a&hid&den@h",
        "https://me:12?a=den@h&a=1",
        "https://me:hid den@h",
        "redis://:hid,redis://den@h",
        "redis://hid?@h",
        "https://h:hidden/x",
        "s3://bucket?endpoint=https://hid:den@h",
    ],
)
def test_errors_show_no_part_of_a_password(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_addresses(text, name="remote")
    shown = str(caught.value)
    for part in ("hid", "den@", ":12"):
        assert part not in shown


def test_an_at_sign_in_the_path_of_a_file() -> None:
    address = one("https://h/x?token_file=/home/me@work/token")
    assert address.option("token_file") == "/home/me@work/token"


def test_an_invalid_type_of_address_is_refused() -> None:
    for value in (3, [3], None, "hidden", "hidden://x"):
        with pytest.raises(ConfigError):
            parse_addresses(value, name="remote")


def test_commands_show_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    click_testing = pytest.importorskip("click.testing")
    from kcache.cli.app import app
    from kcache.dropin import run_environment as environment

    text = "file:///opt/kernels redis://me:hidden@host/2?ro&expire=60"
    monkeypatch.setenv("KCACHE_REMOTE", text)
    for arguments in (["config"], ["config", "--json"], ["doctor"]):
        result = click_testing.CliRunner().invoke(app, arguments)
        assert "hidden" not in result.output
        if "config" in arguments:
            assert result.exit_code == 0, result.output
            assert "redis://***@host/2?ro&expire=60" in result.output
    shown = environment.settings({"KCACHE_REMOTE": text})["KCACHE_REMOTE"]
    assert "hidden" not in shown
    other = environment.settings({"KCACHE_REMOTE": text.replace("hidden", "other")})
    assert other["KCACHE_REMOTE"] != shown
    assert environment.settings({"KCACHE_REMOTE": "nonsense"})


# -- packages that are not installed ---------------------------------------------------------------


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
        open_storage(parsed)
    assert f"pip install {package}" in str(caught.value)
    assert f"the extra {extra}" in str(caught.value)
    assert "hunter2" not in str(caught.value)
