"""The chapter about remotes: 100 KiB from a server on this machine, and by the bare clients."""

import http.client
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from harness.findings import Absent, Comparison, Timing
from harness.measure import interleave, per_call
from harness.plan import KIB, Found, Plan

from kcache import KernelCache
from kcache.entry import Entry, encode
from kcache.kernels.compiled_kernel import CompiledKernel
from kcache.nvrtc import PRODUCER
from kcache.remote.address import parse_addresses
from kcache.remote.daemon_protocol import Upload
from kcache.remote.signing import Sealer, make_keys, make_sealer, write_keys
from kcache.remote.storage import Stored, open_storage

VALUE = os.urandom(100 * KIB)
LIMIT = 1 << 20
LOOPS = 100
BARE = "the bare client"
#: From a program's question until it has the kernel: the service asks the server and checks the
#: entry; the program checks the envelope and decodes it. The program stores the kernel in the local
#: cache after that, once for each machine. The chapter about backends measures such a put.
HIT = "a hit, through the service"
_NGINX = """
daemon off; {user} worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 64; }}
http {{
  access_log off; client_max_body_size 8m; client_body_temp_path {folder}/tmp;
  proxy_temp_path {folder}/tmp; fastcgi_temp_path {folder}/tmp;
  uwsgi_temp_path {folder}/tmp; scgi_temp_path {folder}/tmp;
  server {{
    listen 127.0.0.1:{port}; root {folder}/files;
    dav_methods PUT; create_full_put_path on;
  }}
}}
"""


def remotes(plan: Plan, folder: Path) -> Found:
    """A get by Redis and by HTTP: the bare client, and kcache's with each kind of seal."""
    sealers = _sealers(folder)
    for name, program, package, measured in (
        ("Redis", "redis-server", "redis", _redis),
        ("HTTP", "nginx", "urllib3", _http),
    ):
        if shutil.which(program) is None or find_spec(package) is None:
            yield Absent("remotes", name, f"{program} or the package {package} is not installed")
            continue
        with measured(folder / name) as (address, bare):
            yield from _compared(plan, name, address, bare, sealers)


def _compared(
    plan: Plan,
    name: str,
    address: str,
    bare: Callable[[bytes], Callable[[], bytes]],
    sealers: dict[str, Sealer],
) -> Found:
    (parsed,) = parse_addresses(f"{address}?timeout=60&connect_timeout=60", name="remote")
    client = open_storage(parsed)
    asks = {BARE: bare(VALUE)}
    for number, (kind, sealer) in enumerate(sealers.items()):
        key = f"{number:02x}" * 32
        client.put(key, sealer.seal(VALUE))
        asks[kind] = _asking(lambda key=key: client.get(key, LIMIT), sealer)  # type: ignore[misc]
    for kind, ask in asks.items():
        if ask() != VALUE:
            raise RuntimeError(f"{name}, {kind}: another value")
    with _through_the_service(f"{address}?timeout=60&connect_timeout=60&slow=60") as ask:
        asks[HIT] = ask
        tasks = [per_call(kind, ask, LOOPS) for kind, ask in asks.items()]
        rounds = interleave(plan.calls, tasks)
    client.close()
    for kind in (*sealers, HIT):
        yield Comparison("remotes", rounds).ratio(
            f"get of 100 KiB by {name}, {kind}", kind, BARE, BARE
        )
    for kind in asks:
        yield Timing("remotes", kind, f"get of 100 KiB: {name}", rounds.summary(kind))


def _asking(get: Callable[[], Stored | None], sealer: Sealer) -> Callable[[], bytes]:
    def ask() -> bytes:
        found = get()
        if found is None:
            raise RuntimeError("it is gone")
        return sealer.unseal(found.value)

    return ask


@contextmanager
def _through_the_service(address: str) -> Iterator[Callable[[], bytes]]:
    """Yields what returns the code of a kernel from a remote to this program."""
    key = "ff" * 32
    with tempfile.TemporaryDirectory(prefix="kcb-") as folder, _runtime(folder):
        cache = KernelCache(Path(folder, "cache"), remote=address, memory_size=0)
        remotes = cache._on_miss().remotes
        if remotes is None:
            raise RuntimeError(f"{address} is not used")
        entry = encode(key, Entry({"cubin": VALUE}), producer=PRODUCER.encode())
        remotes.client.put(Upload((key, entry)))
        if not remotes.client.flush(60):
            raise RuntimeError("it is not stored")

        def ask() -> bytes:
            found, entry, _ = next(remotes._kernels._entries((key,), again=False))
            return CompiledKernel.from_entry(entry, found, ()).cubin or b""

        yield ask
        cache.close()


@contextmanager
def _runtime(folder: str) -> Iterator[None]:
    """Has the service of the block listen in a folder of its own."""
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = folder
    try:
        yield
    finally:
        del os.environ["XDG_RUNTIME_DIR"]
        if before is not None:
            os.environ["XDG_RUNTIME_DIR"] = before


def _sealers(folder: Path) -> dict[str, Sealer]:
    found = {"unsigned": make_sealer()}
    if find_spec("cryptography") is not None:
        write_keys(str(folder / "keys"), make_keys()[0])
        found["Ed25519"] = make_sealer(str(folder / "keys"))
    return found


@contextmanager
def _redis(folder: Path) -> Iterator[tuple[str, Callable[[bytes], Callable[[], bytes]]]]:
    import redis

    port = _free_port()
    folder.mkdir()
    settings = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with _running(["redis-server", *settings], port):
        client = redis.Redis(port=port)

        def bare(value: bytes) -> Callable[[], bytes]:
            client.set("bare", value)
            return lambda: client.get("bare")  # type: ignore[return-value]

        yield f"redis://127.0.0.1:{port}", bare
        client.close()


@contextmanager
def _http(folder: Path) -> Iterator[tuple[str, Callable[[bytes], Callable[[], bytes]]]]:
    port = _free_port()
    for name in ("files", "tmp"):
        (folder / name).mkdir(parents=True)
    user = "user root;" if hasattr(os, "geteuid") and os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(_NGINX.format(folder=folder, port=port, user=user))
    with _running(["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")], port):
        client = http.client.HTTPConnection("127.0.0.1", port)

        def bare(value: bytes) -> Callable[[], bytes]:
            (folder / "files" / "bare").write_bytes(value)

            def ask() -> bytes:
                client.request("GET", "/bare")
                return client.getresponse().read()

            return ask

        yield f"http://127.0.0.1:{port}/kernels", bare
        client.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    """Runs a server until the end of the block."""
    with open(os.devnull, "wb") as nowhere:
        server = subprocess.Popen(command, stdout=nowhere, stderr=nowhere)
    try:
        end = time.monotonic() + 60
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
                break
            if server.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{command[0]} did not start")
            time.sleep(0.02)
        yield
    finally:
        server.terminate()
        server.wait(timeout=60)
