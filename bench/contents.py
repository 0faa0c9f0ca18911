"""The table of contents: every chapter of the benchmarks, in the order in which they are run.

A chapter is a function of a `Plan`, which says how often and on how much, and of an empty folder.
It yields what it finds; see `harness.findings`.
"""

from collections.abc import Callable
from pathlib import Path

from chapters import (
    backends,
    compile_many,
    damage,
    disk_usage,
    dropin,
    file_counts,
    fresh_process,
    growth,
    header_count,
    lmdb_million,
    loaded_kernel,
    main_job_ratios,
    many_processes,
    memory_and_engine,
    remote_gets,
    sizes,
    stampede,
    warm_up,
)
from contenders import contenders
from harness.plan import Found, Plan

CHAPTERS: dict[str, Callable[[Plan, Path], Found]] = {
    "kernels": main_job_ratios.kernels,
    "start": fresh_process.start,
    "memory": memory_and_engine.memory,
    "engine": memory_and_engine.engine,
    "tier": memory_and_engine.tier,
    "peers": contenders.peers,
    "sizes": sizes.sizes,
    "growth": growth.growth,
    "files": file_counts.files,
    "million": lmdb_million.million,
    "gets": backends.gets,
    "zstd": backends.zstd,
    "crowd": many_processes.crowd,
    "disk": disk_usage.disk,
    "trust": damage.trust,
    "stampede": stampede.stampede,
    "many": compile_many.many,
    "headers": header_count.headers,
    "warm": warm_up.warm,
    "loaded": loaded_kernel.loaded,
    "remotes": remote_gets.remotes,
    "dropin": dropin.dropin,
}
TITLES = {
    "kernels": "The main job: compile once, hit ever after",
    "start": "A fresh process",
    "memory": "A hit in memory",
    "engine": "A hit from the file backend",
    "tier": "Bytes held by the memory tier",
    "peers": "The peers, and what each of them does",
    "sizes": "Gets and puts against size",
    "growth": "Puts, opening and memory against the number of entries",
    "files": "Files: few entries and many",
    "lmdb": "LMDB: few entries and many",
    "million": "LMDB: up to a million entries",
    "peer": "Puts at the cap, beside cuda.core",
    "gets": "A hit from each backend",
    "zstd": "What zstd saves, and what it costs",
    "crowd": "Several processes at once",
    "disk": "Bytes on disk",
    "trust": "What is served, kept and lost when something goes wrong",
    "stampede": "One kernel for many processes",
    "many": "Many kernels for one process",
    "headers": "Verification against the number of headers",
    "warm": "Warm-up, and again",
    "loaded": "A loaded kernel asked for again",
    "remotes": "A kernel from a server on the same machine",
    "dropin": "Programs under `kcache run`",
}
