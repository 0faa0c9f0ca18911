"""Build hooks: reject an old Python at once, and compile the native parts for the wheel.

`KCACHE_WHEEL` chooses the wheel:

================================  ==================================================================
`native` (or not set)             for this machine; if it has no C compiler, a pure wheel
`x86_64`, `aarch64`               for machines of this kind with glibc 2.17 or newer; the build
                                  needs the package `ziglang`, a C compiler for every machine
`any`                             a pure wheel, which has no native parts
================================  ==================================================================

With a pure wheel or an editable installation, `kcache run` compiles the native parts on first use,
or prints what is missing.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_OLDEST = (3, 11)
_BUILD = os.path.join("kcache", "dropin", "build.py")
_GLIBC = "2.17"  # NVRTC's own wheels need it, too; it is the first version for AArch64
_CHOICES = ("native", "x86_64", "aarch64", "any")


class PythonVersion(MetadataHookInterface):
    """Rejects an old Python before pip tries every version of every dependency."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Exit with a message of one line if this Python is too old."""
        if sys.version_info < _OLDEST:
            needed, found = (".".join(map(str, each)) for each in (_OLDEST, sys.version_info[:3]))
            sys.exit(f"kcache needs Python {needed} or newer, and this is Python {found}")


class NativeParts(BuildHookInterface):  # its type parameters differ from version to version
    """Adds the native parts to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the native parts into a temporary folder, unless this wheel is pure."""
        wanted = os.environ.get("KCACHE_WHEEL", "native")
        if wanted not in _CHOICES:
            sys.exit(f"KCACHE_WHEEL: expected one of {', '.join(_CHOICES)}, got {wanted}")
        if version == "editable" or wanted == "any" or not sys.platform.startswith("linux"):
            return
        build = _load(os.path.join(self.root, _BUILD))
        if wanted == "native" and build.compiler() is None:
            self.app.display_warning("no C compiler is found: the wheel has no native parts")
            return
        self._folder = tempfile.TemporaryDirectory(prefix="kcache-wheel-")
        folder = os.path.join(self._folder.name, "lib")
        machine = os.uname().machine if wanted == "native" else wanted
        build.build(folder, toolchain=None if wanted == "native" else _zig(build, machine))
        build_data["force_include"][folder] = "kcache/dropin/lib"
        client = os.path.join(folder, machine, build.CLIENT)
        build_data["shared_scripts"][client] = build.CLIENT
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform(folder, machine)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder with the native parts."""
        folder = getattr(self, "_folder", None)
        if folder is not None:
            folder.cleanup()


def _zig(build: ModuleType, machine: str) -> Any:  # noqa: ANN401  a `Toolchain` of that module
    """Return a compiler for a machine and the oldest supported glibc.

    What it compiles has no debug information, so it contains no path of this machine.
    """
    zig = (sys.executable, "-m", "ziglang", "cc", "-g0", "-Wl,-s")
    targets = (f"{machine}-linux-gnu.{_GLIBC}", f"x86-linux-gnu.{_GLIBC}")
    return build.Toolchain(machine, *((*zig, "-target", target) for target in targets))


def _platform(folder: str, machine: str) -> str:
    """Return the wheel's platform tag: the oldest glibc that has all used symbols (PEP 600)."""
    minors = [int(minor) for path in _files(folder) for minor in _SYMBOLS(path.read_bytes())]
    return f"manylinux_2_{max(minors)}_{machine}" if minors else f"linux_{machine}"


_SYMBOLS = re.compile(rb"\0GLIBC_2\.(\d+)").findall


def _files(folder: str) -> Iterator[Path]:
    return (path for path in Path(folder).rglob("*") if path.is_file())


def _load(path: str) -> ModuleType:
    """Import a module by the path of its file, because kcache is not installed yet."""
    spec = importlib.util.spec_from_file_location("kcache_dropin_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
