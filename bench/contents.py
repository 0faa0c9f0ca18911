"""The table of contents: every chapter of the benchmarks, in the order in which they are run.

A chapter is a function of a `Plan`, which says how often and on how much, and of an empty folder.
It yields what it finds; see `findings`.
"""

from collections.abc import Callable
from pathlib import Path

import chapters
import compiling
import crowd
import disk
import files
import growth
import loaded
import million
import precompiled
import reading
import sizes
import stampede
import starting
import together
import trust
import verifying
import warm
from contenders import contenders
from harness.plan import Found, Plan

CHAPTERS: dict[str, Callable[[Plan, Path], Found]] = {
    "kernels": compiling.kernels,
    "start": starting.start,
    "memory": chapters.memory,
    "engine": chapters.engine,
    "tier": chapters.tier,
    "peers": contenders.peers,
    "sizes": sizes.sizes,
    "growth": growth.growth,
    "files": files.files,
    "million": million.million,
    "gets": reading.gets,
    "zstd": reading.zstd,
    "crowd": crowd.crowd,
    "disk": disk.disk,
    "trust": trust.trust,
    "stampede": stampede.stampede,
    "many": together.many,
    "headers": verifying.headers,
    "precompiled": precompiled.precompiled,
    "warm": warm.warm,
    "loaded": loaded.loaded,
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
    "precompiled": "Precompiled headers",
    "warm": "Warm-up, and again",
    "loaded": "A loaded kernel asked for again",
}
