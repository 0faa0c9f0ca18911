"""Build hook: compiles the drop-in's interface libraries into the wheel, where there is a compiler.

Such a wheel is for its platform; one without them is for any, and `kcache run` then builds them on
first use, or says what is missing. An editable installation always does.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
import tempfile
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILD = os.path.join("kcache", "dropin", "build.py")


class InterfaceLibraries(BuildHookInterface[Any]):
    """Adds the libraries to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build them, unless this is no wheel for Linux or there is no compiler."""
        if version == "editable" or not sys.platform.startswith("linux"):
            return
        build = _load(os.path.join(self.root, _BUILD))
        if build.compiler() is None:
            self.app.display_warning("no C compiler: a wheel without interface libraries")
            return
        self._folder = tempfile.TemporaryDirectory(prefix="kcache-wheel-")
        folder = os.path.join(self._folder.name, "lib")
        build.build(folder)
        build_data["force_include"][folder] = "kcache/dropin/lib"
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was built."""
        folder = getattr(self, "_folder", None)
        if folder is not None:
            folder.cleanup()


def _load(path: str) -> Any:  # noqa: ANN401  a module
    """Import a file by its path: nothing is installed yet."""
    spec = importlib.util.spec_from_file_location("kcache_dropin_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
