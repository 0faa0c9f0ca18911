"""The chapters about one operation, a hit in memory or a get, and about what memory holds."""

import os
import random
from functools import partial
from pathlib import Path

import xxhash
from bench_memory_tier import POPULATIONS
from contenders.contenders import IN_MEMORY, peer_module
from harness.findings import Absent, Comparison, Ratio
from harness.main_job import SELF_CONTAINED, Job
from harness.measure import Round, Summary, interleave, per_call, per_item, raw_read
from harness.plan import Found, Plan

import kcache

# -- memory: a hit in the memory tier ------------------------------------------------------------


def memory(plan: Plan, folder: Path) -> Found:
    """A hit in memory on 4 KB of source, against cuda.core's cache in memory."""
    try:
        core, utils = peer_module(), peer_module(".utils")
    except RuntimeError as error:
        yield Absent("memory", IN_MEMORY, str(error))
        return
    case = SELF_CONTAINED
    source = case.source
    options = core.ProgramOptions(arch=case.arch)
    peer = utils.InMemoryProgramCache()
    program = core.Program(source, "c++", options)
    job = Job(case, folder)
    get, ours = job.memory_cache.get_or_compile, job.options
    loops = 500

    def copies() -> list[str]:
        """Equal texts in new objects, whose hash no earlier call has computed."""
        return [(source + " ")[:-1] for _ in range(loops)]

    def compile_text(text: str) -> None:
        core.Program(text, "c++", options).compile("cubin", cache=peer)

    def get_text(text: str) -> None:
        get(text, (), ours)

    def new_texts() -> Round:
        return {
            **per_item("kcache, new text", get_text, copies())(),
            **per_item("peer, new text", compile_text, copies())(),
        }

    tasks = [
        per_call("kcache", lambda: get(source, (), ours), 4 * loops),
        per_call("peer", lambda: program.compile("cubin", cache=peer), loops),
        per_call("peer, new program", lambda: compile_text(source), loops),
        new_texts,
    ]
    interleave(2, tasks)
    if len(peer) != 1 or not get(source, (), ours).cached:
        raise RuntimeError("not a hit")
    rounds = interleave(plan.calls, tasks)
    ratio = partial(Comparison("memory", rounds).ratio, at_least=True)
    hit = "hit in memory, 4 KB of source"
    peer_hit = f"{IN_MEMORY} hit"
    yield ratio(hit, "kcache", f"{peer_hit}, `program.compile` alone", "peer", target=8)
    yield ratio(hit, "kcache", f"{peer_hit}, `Program(...).compile`", "peer, new program", target=8)
    yield ratio(
        f"{hit}, in a new string each time",
        "kcache, new text",
        f"{peer_hit}, `Program(...).compile`, likewise",
        "peer, new text",
    )


# -- engine: one get from the file backend -------------------------------------------------------


def engine(plan: Plan, folder: Path) -> Found:
    """`CacheEngine.get` of 100 KiB, against a raw read of a file of that size."""
    size, count = 100 << 10, 500
    keys = [kcache.hash_source(str(number)) for number in range(count)]
    content = {key: os.urandom(size) for key in keys}
    paths = {key: folder / "raw" / key[:2] / key for key in keys}
    for key, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content[key])
    order = random.Random(0).sample(keys, count)
    raw_order = [str(paths[key]) for key in order]
    with kcache.open_engine(folder / "engine", memory_size=0) as opened:
        for key in keys:
            opened.put(key, kcache.Entry({"cubin": content[key]}, {"compile_seconds": 1.0}))

        def first_gets() -> Round:
            # A new engine has not recorded any use yet, so each of its gets records one.
            with kcache.open_engine(folder / "engine", memory_size=0) as new:
                return per_item("first", new.get, order)()

        def get_payload(key: str) -> None:
            found = opened.get(key)
            if found is None or len(found.payload["cubin"]) != size:
                raise RuntimeError("an entry is gone")

        tasks = [
            per_item("raw", raw_read, raw_order),
            first_gets,
            per_item("get", opened.get, order),
            per_item("payload", get_payload, order),
            per_item("hashed", _raw_read_hashed, raw_order),
            per_item("raw, same", raw_read, raw_order[:1] * count),
            per_item("get, same", opened.get, order[:1] * count),
            per_item("hashed, same", _raw_read_hashed, raw_order[:1] * count),
        ]
        interleave(2, tasks)
        rounds = interleave(plan.calls, tasks)
        if opened.stats().misses:
            raise RuntimeError("not a hit")
    ratio = Comparison("engine", rounds).ratio
    raw, hashed = "open, fstat, read, close", "the raw read and its XXH3-128 alone"
    yield ratio("first get of each of 500 keys, 100 KiB", "first", raw, "raw", target=1.5)
    yield ratio("later get of each of 500 keys, 100 KiB", "get", raw, "raw", target=1.5)
    yield ratio(
        "get of one key again and again, 100 KiB", "get, same", raw, "raw, same", target=1.5
    )
    yield ratio("later get and its payload, 500 keys", "payload", raw, "raw")
    yield ratio(f"{hashed}, 500 keys", "hashed", raw, "raw")
    yield ratio(f"{hashed}, one key", "hashed, same", raw, "raw, same")


def _raw_read_hashed(path: str) -> bytes:
    """What a checked read can't do without."""
    return xxhash.xxh3_128_digest(raw_read(path))


# -- tier: what the memory tier holds ------------------------------------------------------------


def tier(plan: Plan, folder: Path) -> Found:
    """Bytes that a full memory tier holds, against its bound."""
    del plan, folder  # sizes in bytes are the same in each round: one is enough
    for name, measure in POPULATIONS.items():
        held = measure()
        beside = "" if held.overhead is None else f", {held.overhead:,.0f} B beside each"
        yield Ratio(
            "tier",
            f"memory tier full of {name} ({held.items}{beside})",
            "its bound",
            "B",
            Summary.of([held.traced]),
            Summary.of([held.bound]),
            Summary.of([held.traced / held.bound]),
            target=1.0,
        )
