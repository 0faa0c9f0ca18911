"""Servers: starts real servers for a test, on free ports of 127.0.0.1, and ends them afterwards."""

import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from core.helpers import run

#: Seconds that a server may take from its start to its first answer on a busy machine.
START = 60.0


@contextmanager
def frozen(process: int) -> Iterator[None]:
    """Stop a process for the block. All its threads have stopped when the block begins."""
    os.kill(process, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + START
        while any(_state(thread) not in "Tt" for thread in Path(f"/proc/{process}/task").iterdir()):
            assert time.monotonic() < deadline, f"process {process} did not stop"
            time.sleep(0.005)
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "T"  # the thread has ended


def program(name: str, package: str) -> str:
    """Return the path of a program. If it is missing, the test is skipped, or fails in CI."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin:/sbin")
    if found is None:
        missing(f"{name} is not installed (Debian: apt-get install {package})")
    return str(found)


def missing(reason: str) -> None:
    """Skip the test, or fail it if `TEST_REMOTES` says that all servers must be installed."""
    if os.environ.get("TEST_REMOTES"):
        pytest.fail(reason)
    pytest.skip(reason)


def free_port() -> int:
    """Return a free port below the range from which the system assigns ports to programs."""
    while True:
        port = 10_000 + secrets.randbelow(22_768)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers."""
    end = time.monotonic() + START
    while not ready():
        if process.poll() is not None or time.monotonic() > end:
            said = log.read_text(errors="replace")[-2000:] if log.exists() else ""
            raise RuntimeError(f"a server did not start ({process.args}): {said}")
        time.sleep(0.02)


def _answers(port: int, question: bytes, answer: bytes) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.sendall(question)
        return answer in client.recv(4096)
    return False


@contextmanager
def _running(command: list[str], log: Path, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            **options,  # type: ignore[call-overload]
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait(timeout=60)


# -- Redis ---------------------------------------------------------------------------------------


class Redis(NamedTuple):
    """A running redis-server."""

    port: int
    process: subprocess.Popen[bytes]


@contextmanager
def redis(place: Path, *more: str, port: int | None = None) -> Iterator[Redis]:
    """Start a redis-server that stores nothing on disk."""
    pytest.importorskip("redis", reason="the package redis is missing")
    path = program("redis-server", "redis-server")
    place.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    settings = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    settings += ["--dir", str(place), "--loglevel", "warning", *more]
    log = place / "redis.log"
    with _running([path, *settings], log) as process:
        _until(lambda: _answers(port, b"PING\r\n", b"\r\n"), process, log)
        yield Redis(port, process)


@contextmanager
def redis_cluster(place: Path) -> Iterator[list[Redis]]:
    """Start a cluster of six redis-servers: three primaries and three replicas."""
    client = program("redis-cli", "redis-tools")
    with ExitStack() as stack:
        nodes = []
        for number in range(6):
            port = free_port()
            bus = str(free_port())
            cluster = ["--cluster-enabled", "yes", "--cluster-node-timeout", "5000"]
            cluster += ["--cluster-config-file", "nodes.conf", "--cluster-port", bus]
            nodes.append(stack.enter_context(redis(place / str(number), *cluster, port=port)))
        addresses = [f"127.0.0.1:{node.port}" for node in nodes]
        replicas = ("--cluster-replicas", "1", "--cluster-yes")
        made = run(client, "--cluster", "create", *addresses, *replicas)
        assert made.returncode == 0, made.stdout
        for node in nodes:
            _until(
                lambda port=node.port: _answers(port, b"CLUSTER INFO\r\n", b"cluster_state:ok"),  # type: ignore[misc]
                node.process,
                place / "0" / "redis.log",
            )
        yield nodes


# -- HTTP ----------------------------------------------------------------------------------------


class Nginx(NamedTuple):
    """An nginx with WebDAV.

    `/cache/` accepts all requests, `/private/` requires `user:secret`, `/token/` requires the
    bearer token `t0ken`, `/certified/` requires a certificate, `/ro/` is read-only, `/closed/`
    refuses all requests, `/moved/` redirects to `/cache/`, and `/away/` to another server.
    """

    port: int
    tls_port: int
    files: Path
    process: subprocess.Popen[bytes]
    certificate: Path


_NGINX = """
daemon off;
{user}
worker_processes 1;
pid {place}/nginx.pid;
error_log {place}/error.log warn;
events {{ worker_connections 256; }}
http {{
  access_log {place}/access.log;
  client_body_temp_path {place}/tmp;
  proxy_temp_path {place}/tmp; fastcgi_temp_path {place}/tmp;
  uwsgi_temp_path {place}/tmp; scgi_temp_path {place}/tmp;
  client_max_body_size 8m;
  keepalive_timeout 60s;
  server {{
    listen 127.0.0.1:{port};
    listen 127.0.0.1:{tls_port} ssl;
    ssl_certificate {place}/server.pem;
    ssl_certificate_key {place}/server.key;
    ssl_client_certificate {place}/server.ca;
    ssl_verify_client optional;
    root {place}/files;
    dav_methods PUT;
    create_full_put_path on;
    location /cache/ {{ }}
    location /private/ {{ auth_basic "kcache"; auth_basic_user_file {place}/users; }}
    location /token/ {{ if ($http_authorization != "Bearer t0ken") {{ return 401; }} }}
    location /ro/ {{ limit_except GET {{ deny all; }} }}
    location /closed/ {{ return 403; }}
    location /certified/ {{ if ($ssl_client_verify != SUCCESS) {{ return 403; }} }}
    location /gone/ {{ return 410; }}
    location /broken/ {{ return 500; }}
    location /moved/ {{ rewrite ^/moved/(.*)$ http://127.0.0.1:{port}/cache/$1 permanent; }}
    location /moved307/ {{ return 307 http://127.0.0.1:{port}/cache$uri; }}
    location /away/ {{ return 307 http://localhost:{port}/token$uri; }}
    location /round/ {{ return 302 /round$uri; }}
    location /untls/ {{ return 302 http://127.0.0.1:{port}/cache$uri; }}
    location /file/ {{ return 302 file:///etc/passwd; }}
    location /nowhere/ {{ return 302 "http://[::"; }}
    {more}
  }}
}}
"""


@contextmanager
def nginx(place: Path, more: str = "") -> Iterator[Nginx]:
    """Start an nginx. `more` is added to the block `server` of its configuration."""
    path = program("nginx", "nginx-light")
    port, tls_port = free_port(), free_port()
    for name in ("files", "tmp"):
        (place / name).mkdir(parents=True)
    ca = certificate(place / "server.pem", place / "server.key")
    crypted = run(program("openssl", "openssl"), "passwd", "-apr1", "secret").stdout
    (place / "users").write_text(f"user:{crypted}")
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    text = _NGINX.format(
        place=place, port=port, tls_port=tls_port, user="user root;" if root else "", more=more
    )
    (place / "nginx.conf").write_text(textwrap.dedent(text))
    command = [path, "-e", str(place / "error.log"), "-p", str(place), "-c", "nginx.conf"]
    command[-1] = str(place / "nginx.conf")
    with _running(command, place / "output.log") as process:
        request = b"GET /nothing HTTP/1.0\r\n\r\n"
        _until(lambda: _answers(port, request, b"404"), process, place / "error.log")
        try:
            yield Nginx(port, tls_port, place / "files", process, ca)
        finally:
            process.terminate()  # nginx then ends its workers
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)


def certificate(path: Path, key: Path) -> Path:
    """Write a certificate for 127.0.0.1 and localhost; return the path of the CA's certificate."""
    ca, ca_key = path.with_suffix(".ca"), path.with_suffix(".cakey")
    name = "subjectAltName=IP:127.0.0.1,DNS:localhost"
    leaf = ["-addext", name, "-addext", "basicConstraints=CA:FALSE", "-CA", str(ca)]
    signs = ["-addext", "keyUsage=critical,keyCertSign"]  # Python 3.13 requires this
    for subject, made, private, more in (
        ("/CN=tests of kcache", ca, ca_key, signs),
        ("/CN=localhost", path, key, [*leaf, "-CAkey", str(ca_key)]),
    ):
        done = run(
            *(program("openssl", "openssl"), "req", "-x509", "-newkey", "ec"),
            *("-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"),
            *("-subj", subject, "-keyout", private, "-out", made, *more),
        )
        assert done.returncode == 0, done.stderr
    ssl.create_default_context(cafile=str(ca))
    return ca


# -- S3 ------------------------------------------------------------------------------------------


class S3(NamedTuple):
    """A server of Moto, which behaves like S3, with a bucket `kernels`."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def s3(place: Path) -> Iterator[S3]:
    """Start a server that behaves like S3."""
    try:
        import moto  # noqa: F401
        import obstore  # noqa: F401
    except ImportError as error:
        missing(f"{error} (pip install 'moto[s3]' flask flask-cors obstore)")
    port = free_port()
    place.mkdir(parents=True, exist_ok=True)
    code = "import sys; from moto.server import main; main(sys.argv[1:])"
    command = [sys.executable, "-W", "ignore", "-c", code, "-H", "127.0.0.1", "-p", str(port)]
    environ = {**os.environ, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    with _running(command, place / "moto.log", env=environ) as process:
        request = b"PUT /kernels HTTP/1.0\r\nHost: s3.amazonaws.com\r\nContent-Length: 0\r\n\r\n"
        _until(lambda: _answers(port, request, b"200"), process, place / "moto.log")
        yield S3(port, process)


# -- a registry of images --------------------------------------------------------------------------

_REGISTRY = """
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: "{place}/images"}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


@contextmanager
def registry(place: Path) -> Iterator[str]:
    """Start a registry without TLS; yield its host and port."""
    path, port = program("docker-registry", "docker-registry"), free_port()
    settings, log = place / "registry.yml", place / "registry.log"
    settings.write_text(_REGISTRY.format(place=place, port=port))
    with _running([path, "serve", str(settings)], log) as process:
        _until(lambda: _answers(port, b"GET /v2/ HTTP/1.0\r\n\r\n", b" 200 "), process, log)
        yield f"127.0.0.1:{port}"
