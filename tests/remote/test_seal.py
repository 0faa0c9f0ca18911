"""Seals: what comes from outside is used only if it is what somebody with the key sealed."""

from __future__ import annotations

import os
import random
import struct
from collections import Counter
from pathlib import Path

import pytest
import xxhash

from kcache.errors import ConfigError
from kcache.remote import keys as keys_module
from kcache.remote.keys import make_keys, public_part, read_keys, write_keys
from kcache.remote.seal import (
    DAMAGED,
    FORGED,
    OTHER_KEY,
    OTHER_SIGNER,
    UNSIGNED,
    PlainSealer,
    Sealer,
    SealError,
    make_sealer,
)

KEY, OTHER = "a1" * 32, "b2" * 32
VALUE = bytes(range(256)) * 5
KINDS = ["plain", "hmac", "ed25519"]


def new_keys(place: Path, kind: str) -> Path:
    """A new file of keys; its public half is beside it."""
    if kind == "ed25519":
        pytest.importorskip("cryptography", reason="cryptography is missing")
    private, public = make_keys(kind)
    write_keys(str(place), private)
    if public:
        write_keys(f"{place}.pub", public, mode=0o644)
    return place


@pytest.fixture(params=KINDS)
def sealer(request: pytest.FixtureRequest, tmp_path: Path) -> Sealer:
    if request.param == "plain":
        return make_sealer()
    return make_sealer(str(new_keys(tmp_path / "keys", request.param)))


def refusal(sealer: Sealer, key: str, sealed: bytes) -> str:
    with pytest.raises(SealError) as caught:
        sealer.unseal(key, sealed)
    return caught.value.reason


@pytest.mark.parametrize("value", [b"", b"x", VALUE])
def test_what_was_sealed_comes_back(sealer: Sealer, value: bytes) -> None:
    assert sealer.can_seal
    assert sealer.unseal(KEY, sealer.seal(KEY, value)) == value


def test_equal_content_has_equal_seals(sealer: Sealer) -> None:
    assert sealer.seal(KEY, VALUE) == sealer.seal(KEY, VALUE)


def test_the_value_of_another_key_is_refused(sealer: Sealer) -> None:
    assert refusal(sealer, OTHER, sealer.seal(KEY, VALUE)) == OTHER_KEY


def test_every_bit_counts(sealer: Sealer) -> None:
    """Each bit of head and end, and some of the middle, turned alone: nothing is used."""
    sealed = sealer.seal(KEY, VALUE)
    places = [*range(64), *range(64, len(sealed) - 160, 37), *range(len(sealed) - 160, len(sealed))]
    for at in places:
        for bit in range(8):
            damaged = bytearray(sealed)
            damaged[at] ^= 1 << bit
            assert refusal(sealer, KEY, bytes(damaged))


def test_every_length_counts(sealer: Sealer) -> None:
    sealed = sealer.seal(KEY, b"short")
    for length in range(len(sealed)):
        assert refusal(sealer, KEY, sealed[:length]) == DAMAGED
    for more in (b"\0", b"x" * 32, sealed):
        assert refusal(sealer, KEY, sealed + more) == DAMAGED
        assert refusal(sealer, KEY, more + sealed) == DAMAGED


def test_10_000_damaged_answers(sealer: Sealer) -> None:
    """By a grammar of damage: parts of right seals, exchanged, repeated, cut, and bits turned."""
    random_ = random.Random(14)
    whole = [sealer.seal(k, v) for k in (KEY, OTHER) for v in (VALUE, b"", b"x" * 99)]
    reasons: Counter[str] = Counter()
    count = 10_000
    while reasons.total() < count:
        answer = _damaged(random_, whole)
        if answer in whole:
            continue  # nothing happened to it
        reasons[refusal(sealer, KEY, answer)] += 1
    assert reasons[DAMAGED] > count / 2


def _damaged(random_: random.Random, whole: list[bytes]) -> bytes:
    answer = bytearray(random_.choice(whole))
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(answer) + 1)
        end = min(len(answer), at + random_.choice((1, 8, 16, 32, 200)))
        match random_.randrange(7):
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
                other = random_.choice(whole)
                answer[at:end] = other[at:end]
            case 5:  # a size that is larger than anything
                if len(answer) > 57:
                    answer[49:57] = struct.pack("<Q", random_.choice((0, 1 << 40, (1 << 64) - 1)))
            case _:
                answer[0:0] = random_.choice(whole)[: random_.choice((8, 57))]
        if not answer:
            answer += b"\0"
    return bytes(answer)


def test_a_right_checksum_is_no_signature(sealer: Sealer) -> None:
    """Whoever can write to the remote can make every checksum right, but no signature."""
    if isinstance(sealer, PlainSealer):
        pytest.skip("without a key there are checksums alone")
    body = bytearray(sealer.seal(KEY, VALUE))
    for at in (9, 20, 40, 60):  # the signer, the key, the value
        forged = bytearray(body)
        forged[at] ^= 1
        end = 57 + len(VALUE)
        forged[end : end + 16] = xxhash.xxh3_128_digest(bytes(forged[:end]))
        assert refusal(sealer, forged[17:49].hex(), bytes(forged)) in (FORGED, OTHER_SIGNER)


def test_unsigned_is_refused_where_there_is_a_key(sealer: Sealer) -> None:
    if not isinstance(sealer, PlainSealer):
        assert refusal(sealer, KEY, PlainSealer().seal(KEY, VALUE)) == UNSIGNED


@pytest.mark.parametrize("kind", KINDS[1:])
def test_another_key_is_refused(kind: str, tmp_path: Path) -> None:
    mine = make_sealer(str(new_keys(tmp_path / "mine", kind)))
    theirs = make_sealer(str(new_keys(tmp_path / "theirs", kind)))
    assert refusal(mine, KEY, theirs.seal(KEY, VALUE)) == OTHER_SIGNER


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_reader_without_a_key_checks_the_checksum(kind: str, tmp_path: Path) -> None:
    sealed = make_sealer(str(new_keys(tmp_path / "keys", kind))).seal(KEY, VALUE)
    assert PlainSealer().unseal(KEY, sealed) == VALUE
    assert refusal(PlainSealer(), KEY, sealed[:-1]) == DAMAGED


def test_a_reader_with_the_public_half_cannot_sign(tmp_path: Path) -> None:
    private = new_keys(tmp_path / "keys", "ed25519")
    reader = make_sealer(f"{private}.pub")
    assert not reader.can_seal
    assert reader.unseal(KEY, make_sealer(str(private)).seal(KEY, VALUE)) == VALUE
    with pytest.raises(SealError, match="no private key"):
        reader.seal(KEY, VALUE)


def test_a_signature_of_one_kind_is_none_of_the_other(tmp_path: Path) -> None:
    """Relabelled as HMAC, with the public key's bytes as the secret: the classic confusion."""
    private = new_keys(tmp_path / "keys", "ed25519")
    reader = make_sealer(f"{private}.pub")
    signed = bytearray(make_sealer(str(private)).seal(KEY, VALUE))
    signed[8] = 1
    end = 57 + len(VALUE)
    signed[end : end + 16] = xxhash.xxh3_128_digest(bytes(signed[:end]))
    assert refusal(reader, KEY, bytes(signed[:-32])) == OTHER_SIGNER


def test_keys_are_exchanged_one_after_the_other(tmp_path: Path) -> None:
    old, new = new_keys(tmp_path / "old", "hmac"), new_keys(tmp_path / "new", "ed25519")
    both = tmp_path / "both"
    write_keys(str(both), new.read_bytes() + b"a comment\n" + old.read_bytes())
    sealer = make_sealer(str(both))
    assert sealer.unseal(KEY, make_sealer(str(old)).seal(KEY, VALUE)) == VALUE
    assert make_sealer(f"{new}.pub").unseal(KEY, sealer.seal(KEY, VALUE)) == VALUE


# -- files of keys -------------------------------------------------------------------------------


def problem(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_keys(str(path))
    return str(caught.value)


@pytest.mark.skipif(os.name == "nt", reason="no modes")
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = new_keys(tmp_path / "keys", "hmac")
    assert path.stat().st_mode & 0o777 == 0o600
    for mode in (0o640, 0o604, 0o620, 0o644):
        path.chmod(mode)
        assert "others can read it" in problem(path)
    path.chmod(0o400)
    assert read_keys(str(path)).signer


@pytest.mark.skipif(os.name == "nt", reason="no modes")
def test_public_keys_may_be_read_by_all_and_written_by_nobody_else(tmp_path: Path) -> None:
    path = Path(f"{new_keys(tmp_path / 'keys', 'ed25519')}.pub")
    assert read_keys(str(path)).signer is None
    path.chmod(0o664)
    assert "others can write to it" in problem(path)


@pytest.mark.skipif(os.name == "nt", reason="no modes")
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    path = new_keys(folder / "keys", "hmac")
    folder.chmod(0o777)
    assert "others can write to" in problem(path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs another user")
def test_another_users_file_is_refused(tmp_path: Path) -> None:
    path = new_keys(tmp_path / "keys", "hmac")
    os.chown(path, 12345, 12345)
    assert "belongs to user 12345" in problem(path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "no key"),
        (b"-----BEGIN KCACHE HMAC KEY-----\nAAAA\n-----END KCACHE HMAC KEY-----\n", "damaged"),
        (b"-----BEGIN KCACHE HMAC KEY-----\n!!\n-----END KCACHE HMAC KEY-----\n", "damaged"),
        (b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "damaged"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "damaged"),
        (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "no key for"),
        (b"x" * 100_000, "few keys"),
    ],
)
def test_files_without_a_key(text: bytes, why: str, tmp_path: Path) -> None:
    if b" PUBLIC " in text or b" PRIVATE " in text or b"CERT" in text:
        pytest.importorskip("cryptography", reason="cryptography is missing")
    path = tmp_path / "keys"
    write_keys(str(path), text)
    assert why in problem(path)


def test_no_file_and_no_plain_file(tmp_path: Path) -> None:
    assert "No such file" in problem(tmp_path / "nowhere")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        assert "no plain file" in problem(tmp_path / "pipe")


def test_keys_of_other_kinds_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="cryptography is missing")
    from cryptography.hazmat.primitives import serialization as to
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

    text = generate_private_key(SECP256R1()).private_bytes(
        to.Encoding.PEM, to.PrivateFormat.PKCS8, to.NoEncryption()
    )
    write_keys(str(tmp_path / "keys"), text)
    assert "no key for HMAC or Ed25519" in problem(tmp_path / "keys")


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    path = new_keys(tmp_path / "keys", "hmac")
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        write_keys(str(path), b"other")
    assert path.read_bytes() == before


def test_kinds_of_keys() -> None:
    with pytest.raises(ConfigError, match="allowed: ed25519, hmac"):
        make_keys("rsa")


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    for kind in KINDS[1:]:
        keys = read_keys(str(new_keys(tmp_path / kind, kind)))
        shown = repr(keys)
        assert keys.verifiers[0].id.hex() in shown
        assert len(shown) < 150
        assert (public_part(keys) == b"") == (kind == "hmac")


def test_without_cryptography_the_message_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_keys(tmp_path / "keys", "ed25519")
    monkeypatch.setitem(__import__("sys").modules, "cryptography.exceptions", None)
    assert "the extra remote" in problem(path)
    assert keys_module._NO_PACKAGE in problem(path)
