"""`kcache doctor` reports for each remote and each layer whether it is used, and if not, why."""

import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http import HTTPStatus
from pathlib import Path

import pytest
from remote.fakes import NO_HURRY, answering
from remote.servers import free_port

from kcache import KernelCache, export_bundle
from kcache.cli.app import app
from kcache.config import Config
from kcache.doctor import Finding
from kcache.doctor.remote_checks import diagnose
from kcache.remote.signing import make_keys, write_keys

pytest.importorskip("click", reason="the extra cli is not installed")


@contextmanager
def server(get: int, put: int = 201) -> Iterator[str]:
    """Run a server with one status for every GET and one for every PUT; yield its host and port."""

    def answer(connection: socket.socket) -> None:
        status = put if connection.recv(1 << 16).startswith(b"PUT") else get
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nConnection: close\r\n"
        connection.sendall(f"{head}Content-Length: 0\r\n\r\n".encode())

    with answering(answer) as port:
        yield f"127.0.0.1:{port}"


def findings(monkeypatch: pytest.MonkeyPatch, **variables: str) -> list[Finding]:
    for name, value in variables.items():
        monkeypatch.setenv(f"KCACHE_{name}", value)
    return list(diagnose(Config.load()))


@pytest.mark.parametrize(
    ("status", "level", "what"),
    [
        (404, "ok", "(HTTP): answers in "),
        (401, "problem", "(HTTP): can't be used: the server answers 401 Unauthorized"),
        (500, "problem", "(HTTP): can't be used: the server answers 500 "),
        (None, "problem", "(HTTP): can't be used: [Errno 111] Connection refused"),
    ],
)
def test_remotes(
    status: int | None,
    level: str,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`kcache doctor --remotes` exits with 1 if a remote does not answer, and shows no password."""
    with server(404) as well, server(status or 404) as host:
        asked = f"127.0.0.1:{free_port()}" if status is None else host
        remotes = f"http://{well}/?{NO_HURRY} http://u:hunter2@{asked}/x?{NO_HURRY}"
        monkeypatch.setenv("KCACHE_REMOTE", remotes)
        code = app.run(["doctor", "--remotes", "--json"])
    said = capsys.readouterr().out
    first, second = json.loads(said)
    assert code == (level == "problem")
    assert (first["topic"], first["level"]) == ("remote", "ok")
    assert (second["topic"], second["level"]) == ("remote", level)
    assert what in second["what"]
    assert "***@" in second["what"]
    assert "hunter2" not in said


def test_a_remote_that_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(404, 401) as host:
        _, found = findings(monkeypatch, REMOTE=f"http://{host}/?{NO_HURRY}")
        _, only_read = findings(monkeypatch, REMOTE=f"http://{host}/?ro&{NO_HURRY}")
    assert found.level == "problem"
    assert "answers, but stores nothing: the server answers 401 Unauthorized" in found.what
    assert (only_read.level, "only read" in only_read.what) == ("ok", True)


def test_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, open_to_all, empty = (tmp_path / name for name in ("good", "open", "empty"))
    with KernelCache(good, backend="zstd") as cache:
        export_bundle(cache, tmp_path / "kernels.kcb")
        cache.engine.backend.put("ab" * 32, b"value")
    empty.mkdir()
    with closing(KernelCache(open_to_all)):
        pass
    open_to_all.chmod(0o777)
    paths = (good, tmp_path / "kernels.kcb", open_to_all, empty, tmp_path / "none")
    told = findings(monkeypatch, REMOTE=" ".join(f"file://{path}" for path in paths))[1:]
    assert [finding.level for finding in told] == ["ok", "ok", "problem", "problem", "problem"]
    for finding, words in zip(
        told,
        (
            "accepted, the directory of a cache",
            "accepted, a bundle",
            "not used: layer",
            "it is not a cache",
            "No such file or directory",
        ),
        strict=True,
    ):
        assert words in finding.what
    assert "others can write to it (mode 0777)" in told[2].what


def test_signing_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography", reason="the extra signing is not installed")
    private, public = make_keys()
    for name, text in (("private", private), ("public", public), ("open", private)):
        write_keys(str(tmp_path / name), text)
    (tmp_path / "open").chmod(0o644)
    with server(404) as host:
        remote = f"http://{host}/"
        keys, _ = findings(monkeypatch, REMOTE=remote)
        assert (keys.level, keys.topic) == ("ok", "signing")
        assert "no signing keys" in keys.what
        keys, asked = findings(
            monkeypatch, REMOTE=remote, SIGNING_KEY_FILE=str(tmp_path / "private")
        )
        assert (keys.level, keys.what.endswith("sign and verify")) == ("ok", True)
        assert asked.what.endswith("read and written, signed")
        keys, asked = findings(monkeypatch, SIGNING_KEY_FILE=str(tmp_path / "public"))
        assert keys.level == "warning"
        assert asked.what.endswith("only read, signed")
        keys, asked = findings(monkeypatch, SIGNING_KEY_FILE=str(tmp_path / "open"))
        assert (keys.level, asked.level) == ("problem", "problem")
    # A read-only address needs no private key.
    keys, _ = findings(
        monkeypatch, REMOTE="http://127.0.0.1:9/?ro", SIGNING_KEY_FILE=str(tmp_path / "public")
    )
    assert keys.level == "ok"
