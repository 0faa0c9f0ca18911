"""What tiers cost where they have nothing to give: a dead remote; and a hit in a layer.

`python bench/remotes.py` prints a table. Redis is started on a free port of 127.0.0.1. Hits from
remotes are measured by the chapter `remotes` of `bench/ratios.py`.
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

from remote import servers
from remote.proxy import Faults, Proxy

import kcache

LOOKUPS = 1000
#: How many calls of one kind come in a row: so few that both kinds meet the same noise of the
#: machine.
CHUNK = 20
ROUNDS = 15
#: The number of lookups beside a dead remote. They take some 5 s, in which the agent is asked
#: again.
LONG = 200
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
    """Calls a function, and adds up the time that it takes."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work
        self.calls = 0
        self.seconds = 0.0

    def __call__(self, *arguments: object) -> Any:
        start = time.perf_counter()
        try:
            return self._work(*arguments)
        finally:
            self.calls += 1
            self.seconds += time.perf_counter() - start


def row(what: str, found: Pair, against: str, target: float) -> None:
    goal = f"of {target}x, {'reached' if found.ratio <= target else 'missed'}"
    times = f"{1e6 * found.ours:8.1f} us  {against:18} {1e6 * found.theirs:8.1f} us"
    print(f"{what:58} {times}  {found.ratio:6.3f}x {goal}", flush=True)


def dead_remotes(port: int, folder: Path) -> None:
    """1,000 lookups of what is nowhere, once the breaker is open."""
    closed = servers.free_port()
    with Proxy(("127.0.0.1", port)) as hole, Proxy(("127.0.0.1", port)) as slow:
        hole.faults = Faults(hole=True)
        slow.faults = Faults(delay=0.3)
        names = {"closed port": closed, "black hole": hole.port, "300 ms": slow.port}
        for name, where in names.items():
            remote = f"redis://127.0.0.1:{where}/0"
            with (
                kcache.KernelCache(folder / "alone") as alone,
                kcache.KernelCache(folder / "alone", remote=remote) as cache,
            ):
                resolver = cache._on_miss()
                remotes = resolver.remotes
                assert remotes is not None
                before = time.perf_counter()
                questions = 0
                while remotes._client.worth_asking:
                    assert cache.lookup(source(questions), options=OPTIONS) is None
                    questions += 1
                spent = time.perf_counter() - before
                asking = Stopwatch(resolver.find_remotely)
                resolver.find_remotely = asking  # type: ignore[method-assign]

                def look(at: int, cache: kcache.KernelCache = cache) -> None:
                    assert cache.lookup(source(at), options=OPTIONS) is None

                def look_alone(at: int, cache: kcache.KernelCache = alone) -> None:
                    assert cache.lookup(source(at), options=OPTIONS) is None

                found = in_turn(look, look_alone, LOOKUPS, rounds=LONG)
                # A lookup seldom asks the agent whether the remote is back, so no median contains
                # this.
                seldom = asking.seconds / (LONG * LOOKUPS)
                found = found._replace(
                    ours=found.ours + seldom, ratio=found.ratio + seldom / found.theirs
                )
                what = f"lookups, {name} ({questions} before: {spent:.2f} s; asked {asking.calls}x)"
                row(what, found, "without a remote", 1.02)
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
        row(what, found, "a plain disk hit", 1.2)


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
        for backend in ("file", "zstd", "lmdb", "zstd+lmdb"):
            for include in ("", "#include <header.cuh>\n"):
                layer_hits(folder, backend, include)
        with servers.redis(folder / "redis") as server:
            dead_remotes(server.port, folder)


if __name__ == "__main__":
    main()
