"""CudaHeaders: finds installed CUDA headers, and names the packages that contain missing ones."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from kcache import environment
from kcache.nvrtc import library

#: Where the wheels put the headers, below a site-packages directory, by CUDA's major version.
_WHEELS = {
    13: ("nvidia/cu13/include",),
    12: ("nvidia/cuda_cccl/include", "nvidia/cuda_runtime/include", "nvidia/cuda_nvcc/include"),
}
#: Where the headers may be below the directory of a toolkit or of a conda environment.
_FOLDERS = ("include", "targets/x86_64-linux/include", "targets/sbsa-linux/include")
#: One header of CCCL (CUB, Thrust, libcu++) and one of the CUDA runtime, to find their folders.
_PROBES = ("cuda/std/cstddef", "cuda_fp16.h")
#: A pattern of header names, the package that contains these headers for CUDA 13, and the package
#: for CUDA 12.
_PACKAGES = (
    (r"(cub|thrust|cuda|nv)/", "nvidia-cuda-cccl", "nvidia-cuda-cccl-cu12"),
    (r"crt/", "nvidia-cuda-crt", "nvidia-cuda-nvcc-cu12"),
    (r"curand", "nvidia-curand", "nvidia-curand-cu12"),
    (
        r"(cuda|cooperative_groups|vector_|device_|math_|sm_\d|texture_|surface_|mma\.h|cu[A-Z])",
        "nvidia-cuda-runtime",
        "nvidia-cuda-runtime-cu12",
    ),
)
_NOT_FOUND = re.compile(r'(?:could not|cannot) open source file "([^"]+)"')


def include_paths() -> tuple[str, ...]:
    """Return the directories of the installed CUDA headers, for `CompileOptions(include_paths=)`.

    The directories contain `cuda_fp16.h`, `cub/...`, `thrust/...`, `cuda/std/...` and the like,
    which NVRTC does not find by itself. They belong to the packages `nvidia-cuda-runtime` and
    `nvidia-cuda-cccl`, or else to the toolkit that contains NVRTC, to a conda environment or to
    another toolkit. A directory whose headers are not installed is left out.
    """
    return tuple(dict.fromkeys(filter(None, map(folder_of, _PROBES))))


def folder_of(header: str) -> str | None:
    """Return the first of CUDA's include directories that contains `header`; None if none does."""
    return next((path for path in _folders() if os.path.isfile(os.path.join(path, header))), None)


def hint(log: str) -> str:
    """Return advice on how to find the CUDA header that `log` reports as missing.

    The advice is an empty text if no header is missing, or if the header is not one of CUDA.
    """
    missing = _NOT_FOUND.search(log)
    if missing is None:
        return ""
    folder, how = folder_of(missing[1]), "include_paths=kcache.include_paths() or --cuda-headers"
    if folder is not None:
        also = f" ({how})" if folder in include_paths() else ""
        return f"pass -I {folder}{also}"
    for pattern, *packages in _PACKAGES:
        if re.match(pattern, missing[1]):
            package = packages[_major() == 12]
            return f"pip install {package}, and pass {how}"
    return ""


def _folders() -> Iterator[str]:
    """Yield the directories that may contain CUDA headers, first those for NVRTC's CUDA version."""
    for folder in _trees():
        yield os.path.join(folder, "cccl")  # since CUDA 13
        yield folder


def _trees() -> Iterator[str]:
    for major in sorted(_WHEELS, key=lambda major: major != _major()):
        for entry in library.site_packages():
            yield from (os.path.join(entry, folder) for folder in _WHEELS[major])
    found = library.find()
    if found is not None:  # a toolkit has NVRTC in `lib64` or in `targets/x86_64-linux/lib`
        yield os.path.join(os.path.dirname(os.path.dirname(found.path)), "include")
    for root in (*environment.values(library.CONDA, *library.TOOLKITS), library.TOOLKIT):
        yield from (os.path.join(root, folder) for folder in _FOLDERS)


def _major() -> int:
    """Return the major CUDA version in the name of NVRTC's file, or 13 if NVRTC is not found."""
    found = library.find()
    path = "" if found is None else found.path
    return 12 if ".so.12" in path or "_120_" in path else 13
