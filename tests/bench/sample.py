"""Findings as a run would make them, small enough to be read in a test."""

from __future__ import annotations

from harness.findings import Absent, Fact, Findings, Point, Ratio, Timing, Took
from harness.measure import Summary
from report.evidence import Evidence

MACHINE = {"CPU": "A CPU", "cores": "2", "kernel": "Linux", "file system": "ext4"}
VERSIONS = {"Python": "3.11.7", "kcache-cuda": "0.1.0", "cuda-core": "1.2.2"}


def summary(median: float, count: int = 5) -> Summary:
    return Summary(median, median * 0.9, median * 1.1, count)


def ratio(
    chapter: str, figure: str, against: str, value: float, target: float | None = None
) -> Ratio:
    ours, other = summary(2e-6 * value), summary(2e-6)
    return Ratio(chapter, figure, against, "s", ours, other, summary(value), target)


def findings(date: str = "2026-11-22", command: str = "python bench/ratios.py") -> Findings:
    found = Findings(date, command, MACHINE, VERSIONS)
    found.took["kernels"] = Took("The main job", 12.3, "0.10", "0.20")
    found.took["sizes"] = Took("Sizes", 4.0, "0.20", "0.30", "OSError: the disk is full")
    found.add(
        [
            ratio("kernels", "`cub`, miss", "bare NVRTC compile", 1.2, target=1.1),
            ratio("kernels", "`cub`, hit", "cuda.core FileStream", 0.125, target=0.25),
            ratio("kernels", "import", "an empty one", 1.05),
            ratio("sizes", "kcache `file`, get of 100 KiB", "diskcache", 0.5),
            Fact("kernels", "the hit loads libnvrtc", "no", "no", met=True),
            Fact("trust", "truncated entry: kcache `file`", "miss", "miss", met=True),
            Fact("trust", "truncated entry: diskcache", "served", "miss", met=False),
            Fact("trust", "synchronised: diskcache", "never", "", met=False),
            Absent("kernels", "CuPy", "ImportError: libcuda.so.1 is not found"),
        ]
    )
    for kernel, seconds in (("`trivial`, 0 headers", 0.08), ("`cub`, 597 headers", 2.0)):
        for column, share in (
            ("bare NVRTC", 1.0),
            ("cold (miss)", 1.1),
            ("hot, fresh process", 0.03),
            ("hot from memory", 0.001),
        ):
            found.add([Timing("kernels", kernel, f"kernel: {column}", summary(seconds * share))])
    for series, role, factor in (
        ("kcache `file`", "ours", 1.0),
        ("diskcache", "peer", 3.0),
        ("raw file read", "floor", 0.5),
    ):
        for x in (1 << 10, 100 << 10, 16 << 20):
            y = summary(factor * (2e-5 + x / 5e9))
            found.add([Point("sizes", "get against size", series, role, x, "bytes", "s", y)])
        for x in (1, 4):
            y = summary(1e4 * factor * x)
            found.add([Point("sizes", "readers", series, role, x, "processes", "1/s", y)])
    return found


def evidence(*runs: Findings) -> Evidence:
    runs = runs or (findings(),)
    return Evidence(runs, tuple(f"{run.date}.json" for run in runs))
