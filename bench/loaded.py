"""A loaded kernel asked for again, beside a memory-hot `get_or_compile`; the first load; a launch.

    python bench/loaded.py [--rounds 50]

For each kernel of the corpus whose headers are here, and one GPU. Without a GPU, a driver or
cuda-core it says so and exits with 0: nothing is measured. Exits with 1 if, for any kernel, loading
again costs more than getting it from memory (the median of ratios taken side by side).

The context is current in the measuring thread, as it is where there is device memory. `first load`
includes the driver's work; of PTX, its compile, unless the driver's own cache has it.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from corpus import NAMES, MissingHeadersError, load
from main_job import Job
from measure import Rounds, Summary, interleave, per_call

import kcache
import kcache.launch

LOOPS = 200
FIRST_LOADS = 5
#: What loading again may cost of a memory-hot `get_or_compile`.
SHARE = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    try:
        arch = current_arch()
    except kcache.DeviceError as error:
        print(f"not measured: {error}")
        return 0
    print(f"{arch}, median of {rounds} rounds, {LOOPS} calls each; microseconds")
    print(f"{'kernel':16} {'get':>8} {'load':>8} {'load/get':>22} {'launch':>8} {'first load':>10}")
    slow = 0
    with tempfile.TemporaryDirectory(prefix="kcache-loaded-") as folder:
        for job in jobs(Path(folder), arch):
            found = measure(job, rounds)
            ratio = found.ratio("load", "get")
            slow += ratio.median > SHARE
            print(row(job.case.name, found, ratio))
    return 1 if slow else 0


def current_arch() -> str:
    """Makes device 0 current and returns its architecture. Raises DeviceError without one."""
    kcache.launch.generation()  # says what is missing
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    major, minor = device.compute_capability
    return f"sm_{major}{minor}"


def jobs(folder: Path, arch: str) -> Iterator[Job]:
    for name in NAMES:
        try:
            case = load(name)
        except MissingHeadersError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        job = Job(case, folder / name)
        job.folder.mkdir()
        job.settings["arch"] = arch
        yield job


def measure(job: Job, rounds: int) -> Rounds:
    cache, case, options = job.memory_cache, job.case, job.options
    kernel = job.hit(cache)
    first = []
    for _ in range(FIRST_LOADS):
        kcache.launch.reset()
        start = time.perf_counter()
        handle = kernel.load()
        first.append(time.perf_counter() - start)
    # No thread finds anything to do: pointers are null and all sizes 0. The GPU is not waited for.
    parameters = handle.kernel.num_arguments
    tasks = [
        per_call("get", lambda: cache.get_or_compile(case.source, case.names, options), LOOPS),
        per_call("load", kernel.load, LOOPS),
    ]
    if case.name == "trivial":
        nothing = (0,) * parameters
        tasks.append(per_call("launch", lambda: handle.launch(1, 32, *nothing), LOOPS))
    found = interleave(rounds, tasks)
    for seconds in first:
        found.add({"first load": seconds})
    return found


def row(name: str, found: Rounds, ratio: Summary) -> str:
    def us(column: str) -> str:
        try:
            return f"{found.summary(column).median * 1e6:.2f}"
        except KeyError:
            return "-"

    share = f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    return (
        f"{name:16} {us('get'):>8} {us('load'):>8} {share:>22} {us('launch'):>8} "
        f"{us('first load'):>10}"
    )


if __name__ == "__main__":
    sys.exit(main())
