"""BundleCheck: whether a bundle would serve the programs of a machine, and if not, why."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kcache.admin.bundles import numbers
from kcache.directory import require_safe_layer
from kcache.errors import ConfigError
from kcache.nvrtc import library
from kcache.util.cuda_driver import current_arch, driver_version

if TYPE_CHECKING:
    from kcache.admin.bundles import BundleContents

#: A target's name: its kind, its number, and the letter of a variant, such as `sm_90a`.
_TARGET = re.compile(r"\w+_(\d+)[a-z]?")


def problems(path: str, contents: BundleContents, archs: tuple[str, ...]) -> Iterator[str]:
    """Yield each reason why programs here would compile in spite of a bundle.

    Args:
        path: of the bundle.
        contents: of the bundle.
        archs: the targets that are needed; empty for that of this machine's GPU. Without targets
            and without a driver, that is a reason, too. A driver that exists is checked.
    """
    if not contents.kernels:
        yield "it has no kernels"
        return
    try:
        require_safe_layer(os.path.abspath(path))
    except ConfigError as error:
        yield str(error)
    compilers = contents.compilers
    found = library.find()
    by = compilers.get("" if found is None else found.identity)
    if by is None:
        expected = " or ".join(f"{name} ({each['version']})" for name, each in compilers.items())
        got = "no NVRTC" if found is None else f"{found.identity} ({found.path})"
        yield f"compiler: expected {expected}, got {got}"
    has = contents.archs if by is None else by["archs"]
    try:
        archs = archs or (current_arch(),)
    except ConfigError:
        yield "arch: no GPU to take the target from; pass --arch"
    for arch in archs:
        if _number(arch) not in map(_number, has):
            yield f"arch: expected kernels for {arch}, got {', '.join(has) or 'none'}"
    driver, needed = driver_version(), contents.driver if by is None else by["driver"]
    if driver is not None and driver < numbers(needed):
        got = ".".join(map(str, driver))
        yield f"driver: expected one for CUDA {needed} or newer, got one for CUDA {got}"


def _number(arch: str) -> str:
    found = _TARGET.fullmatch(arch)
    return arch if found is None else found[1]
