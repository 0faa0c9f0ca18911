"""The table of contents: every chapter of the benchmarks, in the order in which they are run.

A chapter is a function of a `Plan`, which says how often and on how much, and of an empty folder.
It yields what it finds; see `harness.findings`.
"""

from collections.abc import Callable
from pathlib import Path

from chapters import (
    compile_many,
    damage,
    dropin,
    fresh_process,
    growth,
    main_job_ratios,
    memory,
    remote_gets,
    sizes,
    stampede,
)
from harness.plan import Found, Plan

CHAPTERS: dict[str, Callable[[Plan, Path], Found]] = {
    "kernels": main_job_ratios.kernels,
    "start": fresh_process.start,
    "memory": memory.memory,
    "sizes": sizes.sizes,
    "growth": growth.growth,
    "trust": damage.trust,
    "stampede": stampede.stampede,
    "many": compile_many.many,
    "remotes": remote_gets.remotes,
    "dropin": dropin.dropin,
}
TITLES = {
    "kernels": "The main job: compile once, hit ever after",
    "start": "A fresh process",
    "memory": "A hit in memory",
    "sizes": "Gets and puts against size",
    "growth": "Puts and opening against the number of entries",
    "trust": "What is served, kept and lost when something goes wrong",
    "stampede": "One kernel for many processes",
    "many": "Many kernels for one process",
    "remotes": "A kernel from a server on the same machine",
    "dropin": "Programs under `kcache run`",
}
