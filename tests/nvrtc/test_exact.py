"""Exact: what the compiler asks for decides, even while it changes, and nothing changes the code.

Where an edit of headers decides, see `test_dependencies.py`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvrtc.reference import KERNEL, PTX, agreed, compile_clean, write

from kcache import CompileOptions, KernelCache
from kcache.nvrtc import compiler

pytestmark = pytest.mark.usefixtures("nvrtc")


def paths(*folders: Path | str) -> CompileOptions:
    return PTX.replace(include_paths=[str(folder) for folder in folders])


class During:
    """Does something in the middle of each compile: once the worker was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
        compile_request = compiler.compile_request
        self.count = 0

        def compile_(*args: Any) -> Any:
            self.count += 1
            thread = threading.Thread(target=work)
            thread.start()
            try:
                return compile_request(*args)
            finally:
                thread.join()

        monkeypatch.setattr(compiler, "compile_request", compile_)


def test_another_thread_changes_the_directory_during_compiles(
    cache: KernelCache, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compile belongs to the directory that the program was in when it asked."""
    write(tree / "one/inc/x.h", "#define V 1\n")
    write(tree / "two/inc/x.h", "#define V 2\n")
    source = "#include <x.h>\n" + KERNEL
    os.chdir(tree / "one")

    def change() -> None:
        for folder in ("two", "one", "two") * 10:
            os.chdir(tree / folder)

    expected = compile_clean(source, paths(tree / "one/inc").flags())
    for number in range(2):
        os.chdir(tree / "one")
        During(monkeypatch, change)
        kernel = cache.get_or_compile(f"{source}// {number}", (), paths("inc"))
        monkeypatch.undo()
        assert kernel.ptx == expected.ptx
    for folder in ("one", "two"):
        os.chdir(tree / folder)
        for number in range(2):
            agreed(cache, f"{source}// {number}", paths("inc"))
    os.chdir(tree)


@pytest.mark.parametrize("raw", [b"\xff", b"\xed\xa0\x80"])
def test_a_working_directory_that_is_not_utf8(cache: KernelCache, tree: Path, raw: bytes) -> None:
    here = tree / os.fsdecode(raw)
    header = write(here / "inc/x.h", "#define V 1\n")
    os.chdir(here)
    for value, cached in ((1, False), (2, False), (1, True)):
        header.write_text(f"#define V {value}\n")
        assert agreed(cache, "#include <x.h>\n" + KERNEL, paths("inc")).cached is cached
    os.chdir(tree)
