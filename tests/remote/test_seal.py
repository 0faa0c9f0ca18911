"""Seals: with signing keys, what comes from outside is used only if one of them has signed it."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest
from remote import servers

from kcache.entry import Entry, decode, encode
from kcache.errors import ConfigError, CorruptEntryError
from kcache.remote import keys as keys_module
from kcache.remote.keys import make_keys, public_part, read_keys, write_keys
from kcache.remote.seal import SEAL_ROOM, Sealer, SealError, make_sealer

pytest.importorskip("cryptography", reason="cryptography is missing")

KEY, OTHER = "a1" * 32, "b2" * 32
VALUE = encode(KEY, Entry({"cubin": bytes(range(256)) * 5}, {"x": 1}))


def new_keys(place: Path) -> Path:
    """A new file of keys; its public half is beside it."""
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


def test_what_was_sealed_comes_back(sealer: Sealer) -> None:
    assert sealer.can_seal
    for value in (b"", b"x", VALUE):
        sealed = sealer.seal(value)
        assert sealer.unseal(sealed) == value
        assert sealer.seal(value) == sealed, "equal content has equal seals"
        assert len(sealed) == SEAL_ROOM + len(value)


def test_every_bit_and_every_length_counts(sealer: Sealer) -> None:
    sealed = sealer.seal(VALUE)
    for at in (*range(SEAL_ROOM + 64), *range(SEAL_ROOM + 64, len(sealed), 37)):
        damaged = bytearray(sealed)
        damaged[at] ^= 1 << at % 8
        assert refusal(sealer, bytes(damaged))
    for length in (*range(SEAL_ROOM + 64), len(sealed) - 1):
        assert refusal(sealer, sealed[:length])
    for answer in (sealed + b"\0", sealed + sealed, b"x" + sealed):
        assert refusal(sealer, answer)


@pytest.mark.parametrize("keys", [True, False])
def test_10_000_damaged_answers(keys: bool, tmp_path: Path) -> None:
    """Parts of right answers, exchanged, repeated, cut, and bits turned: nothing is used."""
    random_ = random.Random(14)
    sealer = make_sealer(str(new_keys(tmp_path / "keys")) if keys else None)
    other = encode(OTHER, Entry({"cubin": b"x" * 99}))
    whole = [sealer.seal(value) for value in (VALUE, other)]
    refused = 0
    while refused < 10_000:
        answer = _damaged(random_, whole)
        try:
            found = decode(sealer.unseal(answer), KEY)
        except (SealError, CorruptEntryError):
            refused += 1
        else:
            assert answer == whole[0]
            assert found == decode(VALUE, KEY)


def _damaged(random_: random.Random, whole: list[bytes]) -> bytes:
    answer = bytearray(random_.choice(whole))
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(answer) + 1)
        end = min(len(answer), at + random_.choice((1, 8, 16, 32, 200)))
        match random_.randrange(6):
            case 0:
                for _ in range(random_.randint(1, 9)):
                    answer[random_.randrange(len(answer))] ^= 1 << random_.randrange(8)
            case 1:
                del answer[at:end]
            case 2:
                answer[at:end] = answer[at:end] * 2
            case 3:
                answer[at:end] = random_.randbytes(end - at)
            case 4:
                answer[at:end] = random_.choice(whole)[at:end]
            case _:
                answer[0:0] = random_.choice(whole)[: random_.choice((8, SEAL_ROOM))]
        if not answer:
            answer += b"\0"
    return bytes(answer)


def test_unsigned_and_of_another_key_is_refused(sealer: Sealer, tmp_path: Path) -> None:
    theirs = make_sealer(str(new_keys(tmp_path / "theirs")))
    assert "not signed" in refusal(sealer, VALUE)
    assert "unknown key" in refusal(sealer, theirs.seal(VALUE))


def test_a_signature_is_none_of_another_value(sealer: Sealer) -> None:
    sealed = sealer.seal(VALUE)
    other = encode(OTHER, Entry({"cubin": b"x"}))
    assert "wrong" in refusal(sealer, sealed[:SEAL_ROOM] + other)


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


@pytest.mark.skipif(os.name == "nt", reason="no modes")
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = new_keys(tmp_path / "keys")
    assert path.stat().st_mode & 0o777 == 0o600
    for mode in (0o640, 0o604, 0o644):
        path.chmod(mode)
        assert "others can read it" in problem(path)
    path.chmod(0o400)
    assert read_keys(str(path)).signer


@pytest.mark.skipif(os.name == "nt", reason="no modes")
def test_public_keys_may_be_read_by_all_and_written_by_nobody_else(tmp_path: Path) -> None:
    path = Path(f"{new_keys(tmp_path / 'keys')}.pub")
    assert read_keys(str(path)).signer is None
    path.chmod(0o664)
    assert "others can write to it" in problem(path)


@pytest.mark.skipif(os.name == "nt", reason="no modes")
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    path = new_keys(folder / "keys")
    folder.chmod(0o777)
    assert "others can write to" in problem(path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs another user")
def test_another_users_file_is_refused(tmp_path: Path) -> None:
    path = new_keys(tmp_path / "keys")
    os.chown(path, 12345, 12345)
    assert "belongs to user 12345" in problem(path)


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


def test_no_file_and_no_plain_file(tmp_path: Path) -> None:
    assert "No such file" in problem(tmp_path / "nowhere")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe", 0o600)
        assert "no Ed25519 key" in problem(tmp_path / "pipe")


def test_keys_of_other_kinds_are_refused(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as to
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    other, secret = ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()
    encrypted = to.BestAvailableEncryption(b"secret")
    for name, key, how, why in (
        ("other", other, to.NoEncryption(), "no Ed25519 key"),
        ("encrypted", secret, encrypted, "encrypted"),
    ):
        text = key.private_bytes(to.Encoding.PEM, to.PrivateFormat.PKCS8, how)
        write_keys(str(tmp_path / name), text)
        assert why in problem(tmp_path / name)


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    path = new_keys(tmp_path / "keys")
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        write_keys(str(path), b"other")
    assert path.read_bytes() == before


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    keys = read_keys(str(new_keys(tmp_path / "keys")))
    (known,) = keys.verifiers
    assert repr(keys) == f"<Ed25519 keys {known.hex()}>"


def test_without_cryptography_the_message_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_keys(tmp_path / "keys")
    monkeypatch.setitem(__import__("sys").modules, "cryptography.exceptions", None)
    assert keys_module._NO_PACKAGE in problem(path)
    assert "the extra signing" in keys_module._NO_PACKAGE
