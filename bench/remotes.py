"""What remotes and layers cost: a hit, beyond the bare client; a dead remote; a hit in a layer.

`python bench/remotes.py` prints a table. Redis and nginx are started on free ports of 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from chapters import remote_gets
from remote import servers
from remote.proxy import Faults, Proxy

import kcache

LOOKUPS = 1000
#: How many calls of one kind come in a row: so few that both kinds meet the same noise of the
#: machine.
CHUNK = 20
ROUNDS = 15
#: Compiles beside a dead remote: they take longer than its first pauses.
COMPILES = 150
#: Seconds that a hit in a remote may take beyond the bare client's.
BEYOND = 1.5e-3
KERNELS = 20
OPTIONS = kcache.CompileOptions(arch="sm_80")


class Pair(NamedTuple):
    """Medians over pairs of chunks: the time of a call in seconds of each kind, and their ratio."""

    ours: float
    theirs: float
    ratio: float


def in_turn(
    ours: Callable[[int], object],
    theirs: Callable[[int], object],
    count: int,
    *,
    rounds: int = ROUNDS,
) -> Pair:
    """Calls both `count` times in each round, a chunk of one beside a chunk of the other.

    A chunk in which another program had the processor is one of many pairs, and changes no median.
    """
    works = (ours, theirs)
    pairs: list[list[float]] = []
    for number in range(rounds):
        for chunk in range(count // CHUNK):
            spent = [0.0, 0.0]
            first = (number + chunk) % 2
            for which in (first, 1 - first):
                work = works[which]
                start = time.perf_counter()
                for at in range(chunk * CHUNK, (chunk + 1) * CHUNK):
                    work(at)
                spent[which] = (time.perf_counter() - start) / CHUNK
            pairs.append(spent)
    return Pair(
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(a / b for a, b in pairs),
    )


class Stopwatch:
    """Adds up the time that calls of functions take, also if they raise."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: object) -> Any:
            start = time.perf_counter()
            try:
                return work(*arguments)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def row(what: str, found: Pair, against: str, target: float) -> None:
    goal = f"of {target}x, {'reached' if found.ratio <= target else 'missed'}"
    times = f"{1e6 * found.ours:8.1f} us  {against:18} {1e6 * found.theirs:8.1f} us"
    print(f"{what:58} {times}  {found.ratio:6.3f}x {goal}", flush=True)


def hits(folder: Path) -> None:
    """A hit of 100 KiB through the agent, beside the bare client."""
    for name, measured in (("Redis", remote_gets._redis), ("HTTP", remote_gets._http)):
        with (
            measured(folder / name) as (address, bare),
            remote_gets._through_the_agent(f"{address}?slow=60&timeout=60") as ask,
        ):
            get = bare(remote_gets.VALUE)
            found = in_turn(lambda _: ask(), lambda _, get=get: get(), LOOKUPS)  # type: ignore[misc]
        beyond = found.ours - found.theirs
        goal = f"of {1e6 * BEYOND:.0f} us, {'reached' if beyond <= BEYOND else 'missed'}"
        times = f"{1e6 * found.ours:8.1f} us  {remote_gets.BARE:18} {1e6 * found.theirs:8.1f} us"
        print(f"{f'a hit by {name}':58} {times}  {1e6 * beyond:.0f} us beyond {goal}", flush=True)


def dead_remotes(port: int, folder: Path) -> None:
    """The share of a run that compiles all the time, after the first failures."""
    closed = servers.free_port()
    with Proxy(("127.0.0.1", port)) as hole, Proxy(("127.0.0.1", port)) as slow:
        hole.faults = Faults(hole=True)
        slow.faults = Faults(delay=0.3)
        ports = {"closed port": closed, "black hole": hole.port, "300 ms": slow.port}
        for name, where in ports.items():
            remote = f"redis://127.0.0.1:{where}/0"
            with kcache.KernelCache(folder / name, remote=remote) as cache:
                remotes = cache._on_miss().remotes
                assert remotes is not None
                watch = Stopwatch()
                for method in ("find", "upload"):
                    setattr(remotes, method, watch.around(getattr(remotes, method)))
                compiled = 0
                while remotes._client.worth_asking:
                    cache.get_or_compile(source(compiled), options=OPTIONS)
                    compiled += 1
                first, watch.seconds = watch.seconds, 0.0
                start = time.perf_counter()
                for number in range(compiled, compiled + COMPILES):
                    cache.get_or_compile(source(number), options=OPTIONS)
                whole = (time.perf_counter() - start) / COMPILES
                without = whole - watch.seconds / COMPILES
                what = f"a compile, {name} ({compiled} before it took {first:.2f} s)"
                row(what, Pair(whole, without, whole / without), "without a remote", 1.02)
                remotes._client.stop()


def layer_hits(folder: Path, backend: str, include: str) -> None:
    """A hit in a layer beside a plain hit on disk, each in the memory of neither.

    The layer is the very directory of the plain cache; above it is an empty one of the same kind.
    Nothing is kept above, so that every hit of the layer is a hit in it. A plain hit records its
    use, though not more than once a second for each kernel.
    """
    place = folder / f"{backend}{bool(include)}"
    (place / "include").mkdir(parents=True)
    (place / "include" / "header.cuh").write_text("#define ANSWER 42\n")
    options = OPTIONS.replace(include_paths=[place / "include"]) if include else OPTIONS
    sources = [include + source(at) for at in range(KERNELS)]
    with kcache.KernelCache(place / "layer", memory_size=0, backend=backend) as full:
        for text in sources:
            full.get_or_compile(text, options=options)
    layer = f"file://{place}/layer"
    with (
        kcache.KernelCache(place / "layer", memory_size=0, backend=backend) as plain,
        kcache.KernelCache(
            place / "empty", memory_size=0, backend=backend, remote=layer
        ) as layered,
    ):

        def in_layer(at: int) -> None:
            assert layered.get_or_compile(sources[at % KERNELS], options=options).cached

        def on_disk(at: int) -> None:
            assert plain.get_or_compile(sources[at % KERNELS], options=options).cached

        found = in_turn(in_layer, on_disk, LOOKUPS)
        assert layered.stats().layer_hits == ROUNDS * LOOKUPS
        what = f"a hit in a layer, {backend}{', with a header' if include else ''}"
        row(what, found, "a plain disk hit", 1.3)


def source(at: int) -> str:
    return f'extern "C" __global__ void k(int* out) {{ *out = {at}; }}\n'


@contextlib.contextmanager
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kcb-") as folder:
        runtime = Path(folder, "run")
        runtime.mkdir(mode=0o700)
        os.environ["XDG_RUNTIME_DIR"] = str(runtime)
        yield Path(folder)


def main() -> None:
    with place() as folder:
        hits(folder)
        with servers.redis(folder / "redis") as server:
            dead_remotes(server.port, folder)
        for backend in ("file", "zstd", "lmdb", "zstd+lmdb"):
            for include in ("", "#include <header.cuh>\n"):
                layer_hits(folder, backend, include)


if __name__ == "__main__":
    main()
