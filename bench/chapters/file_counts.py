"""The chapter about files: entries of 100 KiB, few and many, and cuda.core's cache beside them."""

import os
import shutil
from pathlib import Path

from contenders.contenders import BY_NAME, FILE_STREAM, Contender, available
from contenders.population import Population, remove
from contenders.puts_at_cap import PUTS, UNUSED, Putting
from harness.findings import Comparison, Fact, Point
from harness.measure import interleave
from harness.plan import KIB, Found, Plan
from harness.stat_counter import Looks

OURS = "kcache `file`"
PAYLOAD = 100 * KIB
#: The population at which cuda.core's cache is measured, too.
BESIDE_PEER = 10_000
#: How many files a put may look at: the mean, and the largest number.
MEAN_LOOKS, MOST_LOOKS = 10, 4_096
#: How much of the disk has to be free beside the entries themselves.
SPARE = 4 << 30


def files(plan: Plan, folder: Path) -> Found:
    """Puts at the cap into files of 100 KiB."""
    peers, absent = available("files", (BY_NAME[FILE_STREAM],))
    yield from absent
    counts = _that_fit(plan.file_counts, folder)
    chosen: list[tuple[Contender, int]] = [(BY_NAME[OURS], count) for count in counts]
    chosen += [(peer, BESIDE_PEER) for peer in peers]
    populations = [
        Population.fill(each, folder / each.name / str(count), count, PAYLOAD)
        for each, count in chosen
    ]
    os.sync()
    putting = [Putting(population, UNUSED) for population in populations]
    for one in putting:
        one.settle()
    names = [f"{each.name} {count}" for each, count in chosen]
    tasks = [one.task(name) for one, name in zip(putting, names, strict=True)]
    rounds = interleave(plan.fills, tasks)
    looks = _looks(putting[len(counts) - 1])
    for one in putting:
        one.opened.close()
    remove(populations)
    for (each, count), name in zip(chosen, names, strict=True):
        chart, summary = "put of 100 KiB at the cap against entries", rounds.summary(name)
        yield Point("files", chart, each.name, each.role, count, "entries", "s", summary)
    few, many = counts[0], counts[-1]
    ratio = Comparison("files", rounds).ratio
    put = f"{OURS}, put of 100 KiB at the cap among"
    yield ratio(
        f"{put} {many:,} entries",
        f"{OURS} {many}",
        f"among {few:,}",
        f"{OURS} {few}",
        target=2.0,
    )
    for peer in peers:
        yield ratio(
            f"{put} {BESIDE_PEER:,} entries",
            f"{OURS} {BESIDE_PEER}",
            peer.name,
            f"{peer.name} {BESIDE_PEER}",
            target=100.0,
            at_least=True,
        )
    mean, most = sum(looks) / len(looks), max(looks)
    put = f"{put} {many:,} entries: files looked at"
    yield Fact("files", f"{put}, mean", f"{mean:.2f}", f"≤ {MEAN_LOOKS}", 0 < mean <= MEAN_LOOKS)
    yield Fact("files", f"{put}, most", f"{most:,}", f"≤ {MOST_LOOKS:,}", most <= MOST_LOOKS)


def _that_fit(counts: tuple[int, ...], folder: Path) -> tuple[int, ...]:
    """Returns the counts without the largest, as long as there is no room on the disk for all."""
    free = shutil.disk_usage(folder).free - SPARE - BESIDE_PEER * PAYLOAD
    while len(counts) > 1 and sum(counts) * (PAYLOAD + 4 * KIB) > free:
        counts = counts[:-1]
    return counts


def _looks(putting: Putting) -> list[int]:
    """Returns how many files each of many puts looks at."""
    counts: list[int] = []
    for new in putting.new(2 * PUTS):
        with Looks() as looks:
            putting.put(new)
        counts.append(looks.count)
    return counts
