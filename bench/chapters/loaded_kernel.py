"""The chapter about loading: a loaded kernel asked for again, beside a memory-hot get.

It needs one GPU, its driver and cuda-core, and says what is missing. The context is current in the
measuring thread, as it is where there is device memory. A first load includes the driver's work; of
PTX, its compile, unless the driver's own cache has it.
"""

import time
from pathlib import Path

from contenders.contenders import peer_module
from harness.corpus import NAMES, MissingHeadersError, load
from harness.findings import Absent, Comparison, Timing
from harness.main_job import Job
from harness.measure import Rounds, interleave, per_call
from harness.plan import Found, Plan

import kcache
import kcache.launch

LOOPS = 200
FIRST_LOADS = 5
#: The share of a memory-hot `get_or_compile` that another load may take.
TARGET = 1.0


def loaded(plan: Plan, folder: Path) -> Found:
    """For each kernel of the corpus: a get from memory, a load, a first load; one launch."""
    try:
        arch = _current_arch()
    except (kcache.DeviceError, RuntimeError) as error:  # without a driver, a device or cuda-core
        yield Absent("loaded", "a GPU", str(error))
        return
    for name in NAMES:
        try:
            job = Job(load(name), folder / name)
        except MissingHeadersError as error:
            yield Absent("loaded", f"`{name}`", str(error))
            continue
        job.folder.mkdir()
        job.settings["arch"] = arch
        with job.memory_cache:
            rounds = _measure(plan, job)
        yield Comparison("loaded", rounds).ratio(
            f"`{name}`, a loaded kernel asked for again",
            "load",
            "`get_or_compile`, hot from memory",
            "get",
            target=TARGET,
        )
        columns = {"get": "hot from memory", "load": "loaded again", "first load": "first load"}
        if name == "trivial":
            columns["launch"] = "launch"
        for key, column in columns.items():
            yield Timing("loaded", f"`{name}`", f"on {arch}: {column}", rounds.summary(key))


def _current_arch() -> str:
    """Makes device 0 current and returns its architecture. Raises DeviceError without one."""
    kcache.launch.generation()  # its error says what is missing
    device = peer_module().Device(0)
    device.set_current()
    major, minor = device.compute_capability
    return f"sm_{major}{minor}"


def _measure(plan: Plan, job: Job) -> Rounds:
    cache, case, options = job.memory_cache, job.case, job.options
    kernel = job.hit(cache)
    handle, first = kernel.load(), Rounds()
    for _ in range(FIRST_LOADS):
        kcache.launch.reset()
        start = time.perf_counter()
        handle = kernel.load()
        first.add({"first load": time.perf_counter() - start})
    # No thread has anything to do: pointers are null and all sizes are 0. Nothing waits for the
    # GPU.
    parameters = handle.kernel.num_arguments
    tasks = [
        per_call("get", lambda: cache.get_or_compile(case.source, case.names, options), LOOPS),
        per_call("load", kernel.load, LOOPS),
    ]
    if case.name == "trivial":
        nothing = (0,) * parameters
        tasks.append(per_call("launch", lambda: handle.launch(1, 32, *nothing), LOOPS))
    found = interleave(plan.calls, tasks)
    for seconds in first["first load"]:
        found.add({"first load": seconds})
    return found
