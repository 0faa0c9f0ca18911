"""`kcache key`: makes and shows keys that sign kernels for other machines."""

from __future__ import annotations

import json
import os

import click

from kcache.cli.groups import Group
from kcache.cli.open_cache import json_option
from kcache.cli.terminal import show, write_stdout
from kcache.errors import ConfigError
from kcache.remote.keys import ED25519, make_keys, public_part, read_keys, write_keys

__all__ = ["key"]


@click.group(cls=Group, short_help="Make keys that sign kernels for other machines.")
def key() -> None:
    """Make the keys that sign kernels for other machines, and look at them.

    KCACHE_SIGNING_KEY_FILE names the file with the keys. kcache then uses kernels from other
    machines only if one of these keys has signed them.
    """


@key.command()
@click.argument("file", type=click.Path(dir_okay=False))
@click.option(
    "--kind",
    type=click.Choice(["ed25519", "hmac"]),
    default="ed25519",
    show_default=True,
    help="ed25519: readers have the public half and can't sign. hmac: one secret for all.",
)
def new(*, file: str, kind: str) -> None:
    """Write a new key to FILE, which only you can read.

    The public half of an Ed25519 key is written to FILE.pub. Give FILE.pub to the machines that
    only read. The command never replaces a file.
    """
    private, public = make_keys(kind)
    taken = [name for name in (file, f"{file}.pub") if os.path.lexists(name)]
    if taken:
        raise ConfigError(f"{taken[0]} exists already, and is not replaced")
    write_keys(file, private)
    show(f"wrote {file}: it signs and verifies, keep it secret")
    if public is not None:
        write_keys(f"{file}.pub", public, mode=0o644)
        show(f"wrote {file}.pub: it verifies, for machines that only read")


@key.command("show")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--public", is_flag=True, help="Print the public halves as PEM, and nothing else.")
@json_option("array")
def show_key(*, file: str, public: bool, as_json: bool) -> None:
    """Say which keys FILE holds, and what they can do. No secret is printed."""
    if public and as_json:
        raise click.UsageError("--public and --json exclude each other.")
    keys = read_keys(file)
    if public:
        text = public_part(keys)
        if not text:
            raise ConfigError(f"{file} has no key with a public half")
        write_stdout(text)
        return
    found = [
        {
            "id": each.id.hex(),
            "kind": "ed25519" if each.how == ED25519 else "hmac",
            "signs": each is keys.signer,
        }
        for each in keys.verifiers
    ]
    if as_json:
        show(json.dumps(found, indent=2))
        return
    for about in found:
        kind = "Ed25519" if about["kind"] == "ed25519" else "HMAC-SHA256"
        can = "signs and verifies" if about["signs"] else "verifies"
        show(f"{about['id']}  {kind}, {can}")
