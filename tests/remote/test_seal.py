"""Seals: with signing keys, a value from outside is used only if one of the keys has signed it."""

import os
import subprocess
from pathlib import Path

import pytest
from remote import servers

from kcache.entry import Entry, encode
from kcache.errors import ConfigError
from kcache.remote.signing import (
    SEAL_ROOM,
    Sealer,
    SealError,
    make_keys,
    make_sealer,
    public_part,
    read_keys,
    write_keys,
)
from kcache.testing import flipped

pytest.importorskip("cryptography", reason="cryptography is missing")

KEY, OTHER = "a1" * 32, "b2" * 32
VALUE = encode(KEY, Entry({"cubin": bytes(range(256)) * 5}, {"x": 1}))


def new_keys(place: Path) -> Path:
    """Write a new private key to `place`, and its public key to `place` with `.pub` appended."""
    private, public = make_keys()
    write_keys(str(place), private)
    write_keys(f"{place}.pub", public, mode=0o644)
    return place


@pytest.fixture
def sealer(tmp_path: Path) -> Sealer:
    return make_sealer(str(new_keys(tmp_path / "keys")))


def refusal(sealer: Sealer, sealed: bytes) -> str:
    with pytest.raises(SealError) as caught:
        sealer.unseal(sealed)
    return str(caught.value)


def test_a_signed_value_is_verified_and_returned(sealer: Sealer) -> None:
    assert sealer.can_seal
    for value in (b"", b"x", VALUE):
        sealed = sealer.seal(value)
        assert sealer.unseal(sealed) == value
        assert sealer.seal(value) == sealed, "the seals of equal values differ"
        assert len(sealed) == SEAL_ROOM + len(value)


def test_every_bit_and_every_length_counts(sealer: Sealer) -> None:
    sealed = sealer.seal(VALUE)
    for at in (*range(SEAL_ROOM + 64), *range(SEAL_ROOM + 64, len(sealed), 37)):
        assert refusal(sealer, flipped(at, 1 << at % 8)(sealed))
    for length in (*range(SEAL_ROOM + 64), len(sealed) - 1):
        assert refusal(sealer, sealed[:length])
    other = sealed[:SEAL_ROOM] + encode(OTHER, Entry({"cubin": b"x"}))
    for answer in (sealed + b"\0", sealed + sealed, b"x" + sealed, other):
        assert refusal(sealer, answer)


def test_unsigned_and_of_another_key_is_refused(sealer: Sealer, tmp_path: Path) -> None:
    theirs = make_sealer(str(new_keys(tmp_path / "theirs")))
    assert "not signed" in refusal(sealer, VALUE)
    assert "unknown key" in refusal(sealer, theirs.seal(VALUE))


def test_a_reader_without_keys_accepts_any_signature_or_none(sealer: Sealer) -> None:
    reader = make_sealer()
    assert reader.can_seal
    assert reader.seal(VALUE) == VALUE
    assert reader.unseal(sealer.seal(VALUE)) == reader.unseal(VALUE) == VALUE


def test_a_reader_with_the_public_half_cannot_sign(tmp_path: Path) -> None:
    private = new_keys(tmp_path / "keys")
    reader = make_sealer(f"{private}.pub")
    assert not reader.can_seal
    assert reader.unseal(make_sealer(str(private)).seal(VALUE)) == VALUE
    with pytest.raises(SealError, match="no private key"):
        reader.seal(VALUE)


def test_keys_are_exchanged_one_after_the_other(tmp_path: Path) -> None:
    old, new = new_keys(tmp_path / "old"), new_keys(tmp_path / "new")
    both = tmp_path / "both"
    write_keys(str(both), new.read_bytes() + b"a comment\n" + old.read_bytes())
    sealer = make_sealer(str(both))
    assert sealer.unseal(make_sealer(str(old)).seal(VALUE)) == VALUE
    assert make_sealer(f"{new}.pub").unseal(sealer.seal(VALUE)) == VALUE
    public = tmp_path / "public"
    write_keys(str(public), public_part(read_keys(str(both))), mode=0o644)
    assert make_sealer(str(public)).unseal(make_sealer(str(old)).seal(VALUE)) == VALUE


def test_keys_of_openssl_are_ours_and_ours_are_those_of_openssl(tmp_path: Path) -> None:
    program = servers.program("openssl", "openssl")

    def openssl(*arguments: object) -> bytes:
        command = [program, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, check=True, timeout=60).stdout

    theirs, ours = tmp_path / "theirs", new_keys(tmp_path / "ours")
    write_keys(str(theirs), openssl("genpkey", "-algorithm", "ed25519"))
    write_keys(f"{theirs}.pub", openssl("pkey", "-in", theirs, "-pubout"), mode=0o644)
    for private in (theirs, ours):
        sealed = make_sealer(str(private)).seal(VALUE)
        assert make_sealer(f"{private}.pub").unseal(sealed) == VALUE
        assert openssl("pkey", "-in", private, "-pubout") == Path(f"{private}.pub").read_bytes()
        (tmp_path / "signature").write_bytes(sealed[16:SEAL_ROOM])
        (tmp_path / "signed").write_bytes(b"KCSIGN1\n" + VALUE)
        said = openssl(
            *("pkeyutl", "-verify", "-pubin", "-inkey", f"{private}.pub", "-rawin"),
            *("-in", tmp_path / "signed", "-sigfile", tmp_path / "signature"),
        )
        assert b"Success" in said


# -- files of keys -------------------------------------------------------------------------------


def problem(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_keys(str(path))
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no file modes")
@pytest.mark.parametrize(
    ("what", "mode", "why"),
    [
        ("keys", 0o640, "others can read it"),
        ("keys", 0o604, "others can read it"),
        ("keys.pub", 0o664, "others can write to it"),
        (".", 0o777, "others can write to"),
        ("owner", 0o600, "belongs to user 12345"),
        ("keys", 0o400, ""),
        ("keys.pub", 0o644, ""),
    ],
)
def test_modes_of_key_files(what: str, mode: int, why: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = new_keys(folder / "keys")
    if what == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root can change the owner")
        os.chown(path, 12345, 12345)
    else:
        (folder / what).chmod(mode)
    path = folder / what if what == "keys.pub" else path
    assert (
        why in problem(path)
        if why
        else (read_keys(str(path)).signer is None) is (what == "keys.pub")
    )


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
        b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        b"x" * 100_000,
    ],
)
def test_files_without_a_key(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write_keys(str(path), text)
    assert "can't be used" in problem(path)


def test_keys_of_other_kinds_are_refused(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as to
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    other, secret = ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()
    encrypted = to.BestAvailableEncryption(b"secret")
    for name, key, how, why in (
        ("other", other, to.NoEncryption(), "expected Ed25519 keys"),
        ("encrypted", secret, encrypted, "encrypted"),
    ):
        text = key.private_bytes(to.Encoding.PEM, to.PrivateFormat.PKCS8, how)
        write_keys(str(tmp_path / name), text)
        assert why in problem(tmp_path / name)


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    keys = read_keys(str(new_keys(tmp_path / "keys")))
    (known,) = keys.verifiers
    assert repr(keys) == f"<Ed25519 keys {known.hex()}>"


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = new_keys(tmp_path / "keys")
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives", None)
    assert "install kcache with the extra signing" in problem(path)
