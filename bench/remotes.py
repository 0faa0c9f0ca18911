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

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from remote import servers
from remote.proxy import Faults, Proxy

import kcache

COUNT = 200
LOOKUPS = 1000
ROUNDS = 9
OPTIONS = kcache.CompileOptions(arch="sm_80")


def interleaved(works: dict[str, Callable[[int], object]], count: int) -> dict[str, float]:
    """Median over the rounds of the mean time of one call, seconds; the order changes."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(ROUNDS):
        names = list(works)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            work = works[name]
            start = time.perf_counter()
            for at in range(count):
                work(at)
            times[name].append((time.perf_counter() - start) / count)
    return {name: statistics.median(each) for name, each in times.items()}


def row(what: str, ours: float, theirs: float, against: str, target: float | None) -> None:
    ratio = ours / theirs
    goal = ""
    if target is not None:
        goal = f" of {target}x, {'reached' if ratio <= target else 'missed'}"
    times = f"{1e6 * ours:9.1f} us  {against:20} {1e6 * theirs:9.1f} us"
    print(f"{what:45} {times}  {ratio:6.3f}x{goal}", flush=True)


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
                before = time.perf_counter()
                questions = 0
                while True:
                    assert cache.lookup(source(questions), options=OPTIONS) is None
                    questions += 1
                    remotes = cache._on_miss().remotes
                    assert remotes is not None
                    if not remotes._client.worth_asking:
                        break
                spent = time.perf_counter() - before
                client = remotes._client
                client.nothing_until = time.perf_counter() + 600  # what the agent would say again

                def look(at: int, cache: kcache.KernelCache = cache) -> None:
                    assert cache.lookup(source(at), options=OPTIONS) is None

                def look_alone(at: int, cache: kcache.KernelCache = alone) -> None:
                    assert cache.lookup(source(at), options=OPTIONS) is None

                times = interleaved({"with": look, "alone": look_alone}, LOOKUPS)
                what = f"lookups, {name} ({questions} before: {spent:.2f} s)"
                row(what, times["with"], times["alone"], "without a remote", 1.02)
                client.stop()


def layer_hits(folder: Path) -> None:
    """A hit in a layer beside a plain hit on disk, each in the memory of neither."""
    with kcache.KernelCache(folder / "layer", memory_size=0) as full:
        for at in range(20):
            full.get_or_compile(source(at), options=OPTIONS)
    layer = f"file://{folder}/layer"
    with (
        kcache.KernelCache(folder / "layer", memory_size=0) as plain,
        kcache.KernelCache(folder / "empty", memory_size=0, remote=layer) as layered,
    ):

        def in_layer(at: int) -> None:
            assert layered.get_or_compile(source(at % 20), options=OPTIONS).cached

        def on_disk(at: int) -> None:
            assert plain.get_or_compile(source(at % 20), options=OPTIONS).cached

        times = interleaved({"layer": in_layer, "disk": on_disk}, COUNT * 5)
        row("a hit in a layer", times["layer"], times["disk"], "a plain hit on disk", 1.2)


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
        layer_hits(folder)
        with servers.redis(folder / "redis") as server:
            dead_remotes(server.port, folder)


if __name__ == "__main__":
    main()
