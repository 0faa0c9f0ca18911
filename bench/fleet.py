"""A simulation: what a fleet that starts asks of a remote, and how long its ranks wait.

    python bench/fleet.py [--write]

`--write` writes `bench/simulated/fleet.json`, of which the documentation's table is made.

Each node asks for the same list of kernels, one after the other, as its ranks do; the ranks of a
node share one cache, so that they ask the remote once. Nodes begin at random within a second. The
remote answers one request after the other, each after what its rate and its bandwidth take. The
requests of one kernel are those of kcache:

- found: a GET of the manifest, a GET of the kernel;
- not found: a GET of the manifest, a compile, a PUT of the kernel, a GET and a PUT of the manifest;
- with leases, before a compile: a request for the lease, until it is granted, or the kernel is
  there; after it one that gives the lease back.

A layer is asked before the remote, and takes no request.

`tests/remote/test_fleet.py` compares it with real processes that share one Redis, each a node with
a cache of its own.
"""

import argparse
import heapq
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FLEETS = (10, 100, 1000, 10_000)
RESULT = Path(__file__).parent / "simulated" / "fleet.json"


class Fleet(NamedTuple):
    """What starts, and with what.

    Attributes:
        nodes: machines, each with one cache.
        kernels: in the list that each of them asks for.
        kernel_bytes, manifest_bytes: of one entry.
        compile_seconds: of one kernel, on an idle node.
        warm: whether the remote has all kernels at the beginning.
        leases: whether one node at a time compiles a kernel.
        layer: share of the kernels that a layer on each node has.
        spread: seconds within which the nodes begin.
        rate: requests per second that the remote can answer.
        bandwidth: bytes per second of the remote's network.
        latency: seconds that a request takes beside that.
        pause: seconds between two requests for a lease that somebody else has, at the longest;
            the first is a 25th of it.
        cores: compiles that run at full speed at a time, over all nodes; None for any number.
    """

    nodes: int
    kernels: int = 40
    kernel_bytes: int = 100_000
    manifest_bytes: int = 2_000
    compile_seconds: float = 1.0
    warm: bool = False
    leases: bool = False
    layer: float = 0.0
    spread: float = 1.0
    rate: float = 100_000.0
    bandwidth: float = 1.25e9
    latency: float = 0.0005
    pause: float = 0.5
    cores: int | None = None


class Outcome(NamedTuple):
    """What a start cost.

    Attributes:
        compiles: on all nodes.
        requests: to the remote; `peak_requests` in the busiest second.
        sent: bytes in both directions; `peak_bytes` in the busiest second.
        seconds: from the first start until the last node has its last kernel.
    """

    compiles: int
    requests: int
    peak_requests: int
    sent: int
    peak_bytes: int
    seconds: float


class Simulation:
    """Runs one fleet; for one thread. Equal fleets have equal outcomes."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._free_at = 0.0
        #: When each kernel arrives in the remote, and which node has its lease.
        self._there = [0.0 if fleet.warm else float("inf")] * fleet.kernels
        self._leased: set[int] = set()
        self._compiling = 0
        self._compiles = self._requests = self._sent = 0
        self._by_second: Counter[int] = Counter()
        self._bytes_by_second: Counter[int] = Counter()

    def run(self) -> Outcome:
        chance = random.Random(1)
        events = [
            (chance.random() * self._fleet.spread, number, self._node())
            for number in range(self._fleet.nodes)
        ]
        heapq.heapify(events)
        now, last, order = 0.0, 0.0, len(events)
        while events:
            now, _, node = heapq.heappop(events)
            self._now = now
            wake = next(node, None)
            if wake is None:
                last = max(last, now)
            else:
                order += 1
                heapq.heappush(events, (wake, order, node))
        return Outcome(
            self._compiles,
            self._requests,
            max(self._by_second.values(), default=0),
            self._sent,
            max(self._bytes_by_second.values(), default=0),
            round(last, 3),
        )

    def _node(self) -> Iterator[float]:
        """Yield when each step of one node ends."""
        fleet = self._fleet
        in_layer = round(fleet.layer * fleet.kernels)
        for kernel in range(in_layer, fleet.kernels):
            asked = self._now
            yield self._ask(fleet.manifest_bytes if self._has(kernel) else 0)
            leased = False
            pause = fleet.pause / 25
            while fleet.leases and not leased and self._there[kernel] > asked:
                leased = kernel not in self._leased
                if leased:
                    self._leased.add(kernel)
                    yield self._ask(0)
                else:
                    yield self._ask(0)
                    yield self._now + pause
                    pause = min(2 * pause, fleet.pause)
                asked = self._now
                yield self._ask(fleet.manifest_bytes if self._has(kernel) else 0)
            if self._there[kernel] <= asked:
                yield self._ask(fleet.kernel_bytes)
                if leased:
                    self._leased.discard(kernel)
                    yield self._ask(0)
                continue
            self._compiling += 1
            self._compiles += 1
            slow = 1.0 if fleet.cores is None else max(1.0, self._compiling / fleet.cores)
            yield self._now + fleet.compile_seconds * slow
            self._compiling -= 1
            yield self._ask(fleet.kernel_bytes)
            yield self._ask(fleet.manifest_bytes if self._has(kernel) else 0)
            there = self._ask(fleet.manifest_bytes)
            self._there[kernel] = min(self._there[kernel], there)
            yield there
            if leased:
                self._leased.discard(kernel)
                yield self._ask(0)

    def _has(self, kernel: int) -> bool:
        return self._there[kernel] <= self._now

    def _ask(self, size: int) -> float:
        """Return when a request that begins now is answered."""
        fleet = self._fleet
        takes = max(1 / fleet.rate, size / fleet.bandwidth)
        self._free_at = max(self._free_at, self._now) + takes
        self._requests += 1
        self._sent += size
        second = int(self._free_at)
        self._by_second[second] += 1
        self._bytes_by_second[second] += size
        return self._free_at + fleet.latency


def fleets() -> Iterator[tuple[str, Fleet]]:
    """Yield every fleet of the table, with the words of its row."""
    for nodes in FLEETS:
        yield "cold", Fleet(nodes)
        yield "cold, leases", Fleet(nodes, leases=True)
        yield "warm", Fleet(nodes, warm=True)
        yield "warm, a layer with most", Fleet(nodes, warm=True, layer=0.9)
        yield "a layer with all", Fleet(nodes, warm=True, layer=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table's file")
    given = parser.parse_args()
    rows = []
    for name, fleet in fleets():
        outcome = Simulation(fleet).run()
        rows.append({"start": name, **fleet._asdict(), **outcome._asdict()})
        print(f"{fleet.nodes:6} {name:24} {outcome}", file=sys.stderr)
    if given.write:
        RESULT.write_text(json.dumps({"simulated": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
