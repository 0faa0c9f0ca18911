"""The configurations of servers that the documentation recommends do what it says of them."""

from __future__ import annotations

import re
from pathlib import Path

from remote import servers
from remote.machines import ARCH, Machines, of_client, of_remote, source

from kcache.entry import Entry, decode, encode
from kcache.remote.remote import MAX_SETS, merged

PAGE = Path(__file__).parents[2] / "docs/how-to/share-with-your-team.md"
PATIENT = "slow=60&connect_timeout=30&timeout=30"


def test_nginx(hosts: Machines, tmp_path: Path) -> None:
    """Who has a password writes, everybody reads, nobody else writes."""
    (block,) = re.findall(r"```nginx\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    place = tmp_path / "nginx"
    block = block.replace("/srv", f"{place}/srv").replace(
        "/etc/nginx/kcache.users", f"{place}/users"
    )
    (place / "srv").mkdir(parents=True)
    with servers.nginx(place, block) as server:
        at = f"127.0.0.1:{server.port}/kcache"
        with hosts.cache("writes", f"http://user:secret@{at}?{PATIENT}") as cache:
            cache.get_or_compile(source(1), options=ARCH)
            assert of_client(cache).flush(60)
            assert of_remote(cache)["uploads"] == 1
        with hosts.cache("reads", f"http://{at}?{PATIENT}") as cache:
            assert cache.get_or_compile(source(1), options=ARCH).cached
            assert not cache.get_or_compile(source(2), options=ARCH).cached
            assert of_client(cache).flush(60)
            counts = of_remote(cache)
            assert (counts["uploads"], counts["errors"], counts["dropped"]) == (0, 1, 1)
    assert len([path for path in (place / "srv/kcache").rglob("*") if path.is_file()]) == 1


def test_a_remote_manifest_keeps_its_bound() -> None:
    """What many machines merge into one stays as long as a reader reads; the newest are kept."""
    key = "ab" * 32
    manifest = Entry({"set0": b"0"})
    for number in range(1, 3 * MAX_SETS):
        both = merged(manifest, Entry({"set0": b"%d" % number}))
        assert both is not None
        manifest = decode(encode(key, both), key)
    newest = [b"%d" % n for n in reversed(range(2 * MAX_SETS, 3 * MAX_SETS))]
    assert list(manifest.payload.values()) == newest
    assert merged(manifest, Entry({"set0": newest[-1]})) is None


def test_a_remote_manifest_keeps_to_max_entry() -> None:
    manifest = Entry({"set0": b"0" * 10_000, "set1": b"1" * 10_000})
    both = merged(manifest, Entry({"set0": b"2" * 10_000}), 25_000)
    assert both is not None
    assert [raw[:1] for raw in both.payload.values()] == [b"2", b"0"]
    alone = merged(manifest, Entry({"set0": b"2" * 10_000}), 10_000)
    assert alone is not None
    assert list(alone.payload) == ["set0"]
