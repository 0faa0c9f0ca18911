"""`kcache warm` over the benchmark kernels for four architectures, twice: cold, then all there.

    python bench/warm.py [-j N]

Run it in a terminal to see the progress bar. The list and the cache are temporary. Exits with 1 if
the second run compiles anything, or takes more than a twentieth of the first.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from corpus import KERNELS, cases

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120")
#: What the second run may take of the first.
SHARE = 1 / 20


def main() -> int:
    kernels = [
        {
            "source": str(KERNELS / f"{case.name}.cu"),
            "names": list(case.names),
            "std": case.std,
            "include_paths": [str(path) for path in case.include_dirs],
            "extra_options": list(case.extra_options),
        }
        for case in cases()
    ]
    with tempfile.TemporaryDirectory(prefix="kcache-warm-") as folder:
        path = Path(folder, "kernels.json")
        path.write_text(json.dumps({"defaults": {"archs": ARCHS}, "kernels": kernels}))
        cold, _ = warm(folder, "--json")
        hot, found = warm(folder, "--json")
        print(f"{len(kernels)} kernels for {', '.join(ARCHS)}")
        warm(folder)
    print(f"first run {cold:.1f} s, second {hot:.2f} s: {hot / cold:.2%}; whole processes")
    return 0 if found["compiled"] == found["failed"] == 0 and hot <= SHARE * cold else 1


def warm(folder: str, *more: str) -> tuple[float, dict[str, int]]:
    """Runs the command; returns what the process took, in seconds, and what it says as JSON."""
    command = [sys.executable, "-m", "kcache", "warm", f"{folder}/kernels.json", *more]
    command += ["--directory", f"{folder}/cache", *sys.argv[1:]]
    # NVRTC's own cache, where there is a driver, is not what is measured.
    environment = {**os.environ, "CUDA_CACHE_DISABLE": "1"}
    started = time.perf_counter()
    done = subprocess.run(
        command, stdout=subprocess.PIPE if more else None, env=environment, check=True
    )
    seconds = time.perf_counter() - started
    return seconds, json.loads(done.stdout) if more else {}


if __name__ == "__main__":
    sys.exit(main())
