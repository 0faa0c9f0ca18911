"""Edits: compile a kernel with a tree of headers, and check which edits cause a miss."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from nvrtc.reference import KERNEL, PTX, agree, next_tick

import kcache
from kcache.nvrtc import files

#: Maps paths to what is there: a file with this text, a folder ("/"), a symbolic link ("-> PATH"),
#: a hard link ("= PATH"), or nothing (None).
Tree = Mapping[str, str | None]


class Case(NamedTuple):
    """A source, a tree of headers, and edits of the tree.

    After an edit of `misses` there is no hit; after an edit of `hits` there is.
    """

    lines: str
    files: Tree
    misses: Sequence[Tree]
    hits: Sequence[Tree] = ()
    #: The include directories.
    paths: Sequence[str] = ("first", "inc")
    options: Mapping[str, Any] = {}
    #: Headers in memory.
    headers: Mapping[str, str] | None = None
    name: str = "kernel.cu"
    kernel: str = KERNEL


def lay(top: Path, tree: Tree) -> None:
    """Make the folder `top` contain `tree` and nothing else. Every file is created anew."""
    for path in top.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    next_tick()  # within one tick of the clock, old and new files could have the same stamp
    for name, what in tree.items():
        _put(top / name, what)


def _put(path: Path, what: str | None) -> None:
    if what is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if what == "/":
        path.mkdir(exist_ok=True)
    elif what.startswith("-> "):
        path.symlink_to(what[3:])
    elif what.startswith("= "):
        os.link(what[2:], path)
    else:
        path.write_text(what)


def check(cache: kcache.KernelCache, top: Path, name: str, case: Case) -> None:
    """Compile a case once, and look it up after each edit and after each edit is undone.

    This is done twice: with the usual rules, and with the stamps of new files trusted at once. After
    the last of `misses`, the kernel is also compared with that of a compile without a cache.

    Args:
        cache: the cache.
        top: the working directory. In the texts of the case, `{tree}` stands for it.
        name: name of the case.
        case: the case.
    """

    def at_home(text: str) -> str:
        return text.replace("{tree}", str(top))

    source = at_home(case.lines) + case.kernel + f"// {name}\n"
    options = PTX.replace(include_paths=[at_home(path) for path in case.paths], **case.options)
    arguments: dict[str, Any] = {"source_name": at_home(case.name), "headers": case.headers}
    if case.headers is not None:
        arguments["headers"] = {at_home(path): text for path, text in case.headers.items()}
    lay(top, case.files)
    first = cache.get_or_compile(source, (), options, **arguments)
    edits = [*((edit, False) for edit in case.misses), *((edit, True) for edit in case.hits)]
    for fresh in (files.FRESH_NS, -(10**12)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "FRESH_NS", fresh)
            for edit, hit in edits:
                lay(top, {**case.files, **edit})
                found = cache.lookup(source, (), options, **arguments)
                assert (found is not None) is hit, f"{'a miss' if hit else 'a hit'} after {edit}"
                lay(top, case.files)
                again = cache.lookup(source, (), options, **arguments)
                assert again is not None, f"a miss after {edit} was undone"
                assert again.ptx == first.ptx
    lay(top, {**case.files, **(case.misses or [{}])[-1]})
    agree(cache, source, options, **arguments)
