"""`kcache key`: makes and shows keys that sign kernels for other machines."""

from __future__ import annotations

import os

import click

from kcache.cli.app import Group
from kcache.cli.parameters import flag, json_option
from kcache.cli.terminal import show, write_stdout
from kcache.errors import ConfigError
from kcache.remote.signing import id_of, make_keys, public_part, read_keys, write_keys


@click.group(cls=Group, short_help="Make keys that sign kernels for other machines.")
def key() -> None:
    """Make the keys that sign kernels for other machines, and look at them.

    KCACHE_SIGNING_KEY_FILE names the file with the keys. kcache then uses kernels from other
    machines only if one of these keys has signed them.
    """


@key.command()
@click.argument("file", type=click.Path(dir_okay=False))
def new(*, file: str) -> None:
    """Write a new key to FILE, which only you can read.

    It is an Ed25519 key in the form of OpenSSL. Its public half is written to FILE.pub. Give
    FILE.pub to the machines that only read. The command never replaces a file.
    """
    private, public = make_keys()
    taken = [name for name in (file, f"{file}.pub") if os.path.lexists(name)]
    if taken:
        raise ConfigError(f"{taken[0]} exists already, and is not replaced")
    write_keys(file, private)
    show(f"wrote {file}: it signs and verifies, keep it secret")
    write_keys(f"{file}.pub", public, mode=0o644)
    show(f"wrote {file}.pub: it verifies, for machines that only read")


@key.command("show")
@click.argument("file", type=click.Path(dir_okay=False))
@flag("--public", help="Print the public halves as PEM, and nothing else.")
@json_option("array")
def show_key(*, file: str, public: bool, as_json: bool) -> None:
    """Show which keys FILE holds, and what they can do. No secret is printed."""
    if public and as_json:
        raise click.UsageError("--public and --json exclude each other.")
    keys = read_keys(file)
    if public:
        write_stdout(public_part(keys))
        return
    signer = None if keys.signer is None else id_of(keys.signer.public_key())
    found = [{"id": each.hex(), "signs": each == signer} for each in keys.verifiers]
    if as_json:
        show(found)
        return
    for about in found:
        show(f"{about['id']}  {'signs and verifies' if about['signs'] else 'verifies'}")
