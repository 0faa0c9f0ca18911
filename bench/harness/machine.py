"""Machine: what a figure was measured with, the machine, the versions and the day."""

import os
import platform
import sqlite3
import tempfile
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "kcache-cuda",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-cccl",
    "nvidia-cutlass",
    "xxhash",
    "lmdb",
    "zstandard",
    "diskcache",
    "jax",
    "cupy-cuda13x",
    "numpy",
    "matplotlib",
)


def today() -> str:
    """Returns the local date, such as "2026-11-20"."""
    return datetime.now().astimezone().date().isoformat()


def describe_machine() -> dict[str, str]:
    """Returns what the figures depend on and a reader can compare with; no names, no paths."""
    return {
        "CPU": _cpu_model(),
        "cores": str(os.cpu_count()),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "file system": _file_system(Path(tempfile.gettempdir())),
        "load before": load(),
    }


def load() -> str:
    """Returns the load average of the last minute: how busy the machine is with anything."""
    return f"{os.getloadavg()[0]:.2f}"


def versions() -> dict[str, str]:
    """Returns the version of Python and of everything that is measured or measured with."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["SQLite"] = sqlite3.sqlite_version
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _file_system(folder: Path) -> str:
    """Returns the type of the file system that `folder` is on, such as "ext4"."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    # Fields: id, parent, major:minor, ..., "-", type, source, options (proc_pid_mountinfo(5)).
    types = (line.partition(" - ")[2].split()[0] for line in mounts if line.split()[2] == number)
    return next(types, "unknown")
