"""The chapter about a hit in memory, beside cuda.core's cache in memory."""

from functools import partial
from pathlib import Path

from contenders.contenders import IN_MEMORY, peer_module
from harness.findings import Absent, Comparison
from harness.main_job import SELF_CONTAINED, Job
from harness.measure import Round, interleave, per_call, per_item
from harness.plan import Found, Plan


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
