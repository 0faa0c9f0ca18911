"""What a kernel depends on: after each change the cache gives what a fresh compile gives."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from nvrtc.reference import ARCH, KERNEL, agree, agreed, python, working_directory, write

import kcache

pytestmark = pytest.mark.usefixtures("nvrtc")

_GUESS = "#if {0}\n#define V 1\n#else\n#define V 2\n#endif\n"


def paths(*folders: Path | str) -> kcache.CompileOptions:
    return ARCH.replace(include_paths=[str(folder) for folder in folders])


# -- content ---------------------------------------------------------------------------------------


def test_a_changed_header_misses_and_changed_back_hits(cache, tree):
    header = write(tree / "inc/x.h", "#define V 1\n")
    source = '#include "x.h"\n' + KERNEL
    options = paths(tree / "inc")
    assert not agreed(cache, source, options).cached
    assert agreed(cache, source, options).cached
    header.write_text("#define V 2\n")
    assert not agreed(cache, source, options).cached
    assert agreed(cache, source, options).cached
    header.write_text("#define V 1\n")
    assert agreed(cache, source, options).cached
    assert cache.stats().stale == 1


def test_an_edit_that_changes_which_headers_are_included(cache, tree):
    middle = write(tree / "inc/middle.h", "#include <a.h>\n")
    write(tree / "inc/a.h", "#define V 1\n")
    other = write(tree / "inc/b.h", "#define V 2\n")
    source = "#include <middle.h>\n" + KERNEL
    options = paths(tree / "inc")
    agreed(cache, source, options)
    middle.write_text("#include <b.h>\n")
    assert not agreed(cache, source, options).cached
    other.write_text("#define V 3\n")
    assert not agreed(cache, source, options).cached
    middle.write_text("#include <a.h>\n")  # and b.h has changed, which does not matter
    assert agreed(cache, source, options).cached


def test_the_same_size_and_the_old_times(cache, tree):
    header = write(tree / "inc/x.h", "#define V 1\n")
    os.utime(header, (1, 1))
    before = header.stat()
    source = "#include <x.h>\n" + KERNEL
    agreed(cache, source, paths("inc"))
    header.write_text("#define V 2\n")
    os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not agreed(cache, source, paths("inc")).cached


def test_replaced_by_rename(cache, tree):
    header = write(tree / "inc/x.h", "#define V 1\n")
    source = "#include <x.h>\n" + KERNEL
    agreed(cache, source, paths("inc"))
    os.replace(write(tree / "new.h", "#define V 2\n"), header)
    assert not agreed(cache, source, paths("inc")).cached


def test_touched_without_change(cache, tree):
    header = write(tree / "inc/x.h", "#define V 1\n")
    source = "#include <x.h>\n" + KERNEL
    agreed(cache, source, paths("inc"))
    os.utime(header)
    assert agreed(cache, source, paths("inc")).cached


def test_a_header_that_is_deleted_and_put_back(cache, tree):
    header = write(tree / "inc/x.h", "#define V 1\n")
    source = "#include <x.h>\n" + KERNEL
    agreed(cache, source, paths("inc"))
    header.unlink()
    assert agree(cache, source, paths("inc")) is None
    assert cache.lookup(source, (), paths("inc")) is None
    header.write_text("#define V 1\n")
    assert agreed(cache, source, paths("inc")).cached


# -- which file is found ---------------------------------------------------------------------------


def test_a_header_appears_earlier_on_the_path(cache, tree):
    (tree / "first").mkdir()
    write(tree / "second/x.h", "#define V 1\n")
    source = "#include <x.h>\n" + KERNEL
    options = paths("first", "second")
    agreed(cache, source, options)
    shadow = write(tree / "first/x.h", "#define V 2\n")
    assert not agreed(cache, source, options).cached
    shadow.unlink()
    assert agreed(cache, source, options).cached


def test_a_header_appears_in_a_directory_that_did_not_exist(cache, tree):
    write(tree / "second/x.h", "#define V 1\n")
    source = "#include <x.h>\n" + KERNEL
    options = paths("first/deep", "second")
    agreed(cache, source, options)
    write(tree / "first/deep/x.h", "#define V 2\n")
    assert not agreed(cache, source, options).cached


def test_a_header_appears_beside_its_includer(cache, tree):
    write(tree / "inc/sub/a.h", '#include "x.h"\n')
    write(tree / "inc/x.h", "#define V 1\n")
    source = "#include <sub/a.h>\n" + KERNEL
    agreed(cache, source, paths("inc"))
    write(tree / "inc/sub/x.h", "#define V 2\n")
    assert not agreed(cache, source, paths("inc")).cached


@pytest.mark.parametrize("name", ["kernel.cu", "src/kernel.cu", "{tree}/src/kernel.cu"])
def test_a_header_appears_beside_the_source(cache, tree, name):
    name = name.format(tree=tree)
    write(tree / "inc/x.h", "#define V 1\n")
    source = '#include "x.h"\n' + KERNEL
    (tree / "src").mkdir()
    agreed(cache, source, paths("inc"), source_name=name)
    write(tree / Path(name).parent / "x.h", "#define V 2\n")
    assert not agreed(cache, source, paths("inc"), source_name=name).cached


def test_include_directories_inside_each_other(cache, tree):
    """As of CCCL's wheel: `include` and `include/cccl`."""
    write(tree / "inc/sub/x.h", "#define V 1\n")
    source = '#include "sub/x.h"\n' + KERNEL
    options = paths("inc", "inc/sub")
    agreed(cache, source, options)
    assert agreed(cache, source, options).cached
    write(tree / "sub/x.h", "#define V 2\n")
    assert not agreed(cache, source, options).cached


def test_an_include_directory_inside_a_later_one(cache, tree):
    (tree / "first").mkdir()
    write(tree / "inc/sub/x.h", "#define V 1\n")
    source = "#include <sub/x.h>\n" + KERNEL
    options = paths("first", "inc/sub", "inc")
    agreed(cache, source, options)
    write(tree / "first/sub/x.h", "#define V 2\n")
    assert not agreed(cache, source, options).cached


def test_the_folder_of_the_source_is_on_the_path_too(cache, tree):
    write(tree / "src/x.h", "#define V 1\n")
    (tree / "first").mkdir()
    source = '#include "x.h"\n' + KERNEL
    options = paths("first", "src")
    agreed(cache, source, options, source_name="src/kernel.cu")
    write(tree / "first/x.h", "#define V 2\n")  # never looked at: the one beside comes first
    assert agreed(cache, source, options, source_name="src/kernel.cu").cached
    (tree / "src/x.h").unlink()
    assert not agreed(cache, source, options, source_name="src/kernel.cu").cached


def test_nested_here_and_apart_elsewhere(cache, tree):
    """What was one file under two names must not stand for two files."""
    write(tree / "one/inc/sub/x.h", "#define V 1\n")
    source = "#include <sub/x.h>\n" + KERNEL
    agreed(cache, source, paths("one/inc", "one/inc/sub"))
    write(tree / "two/inc/sub/x.h", "#define V 2\n")
    write(tree / "two/sub/x.h", "#define V 1\n")
    agreed(cache, source, paths("two/inc", "two/sub"))


def test_a_relative_include_directory_here_and_another_elsewhere(cache, tree):
    write(tree / "inc/x.h", "#define V 1\n")
    source = '#include "inc/x.h"\n' + KERNEL
    agreed(cache, source, paths("inc"))
    write(tree / "other/x.h", "#define V 1\n")
    write(tree / "inc/x.h", "#define V 2\n")
    agreed(cache, source, paths("other"))


def test_no_source_include(cache, tree):
    """The option switches off the search beside every file, not beside the source alone."""
    write(tree / "inc/sub/a.h", _GUESS.format('__has_include("x.h")'))
    write(tree / "inc/sub/x.h", "")
    source = "#include <sub/a.h>\n" + KERNEL
    options = paths("inc").replace(extra_options=["--no-source-include"])
    agreed(cache, source, options)
    write(tree / "inc/x.h", "")
    assert not agreed(cache, source, options).cached


def test_no_source_include_in_a_header(cache, tree):
    write(tree / "inc/sub/a.h", '#include "x.h"\n')
    write(tree / "inc/sub/x.h", "#define V 1\n")
    later = write(tree / "later/x.h", "#define V 2\n")
    source = "#include <sub/a.h>\n" + KERNEL
    options = paths("inc", "later").replace(extra_options=["--no-source-include"])
    agreed(cache, source, options)
    later.write_text("#define V 3\n")
    assert not agreed(cache, source, options).cached
    write(tree / "inc/x.h", "#define V 4\n")
    assert not agreed(cache, source, options).cached


def test_include_next(cache, tree):
    for number, folder in enumerate(("one", "two", "three")):
        text = "#include_next <x.h>\n" if number < 2 else "#define V 1\n"
        write(tree / folder / "x.h", text)
    source = "#include <x.h>\n" + KERNEL
    options = paths("one", "two", "three")
    agreed(cache, source, options)
    (tree / "two/x.h").unlink()
    assert not agreed(cache, source, options).cached
    (tree / "three/x.h").write_text("#define V 2\n")
    assert not agreed(cache, source, options).cached
    write(tree / "two/x.h", "#define V 3\n")
    assert not agreed(cache, source, options).cached


@pytest.mark.parametrize("operand", ["HDR", "PICK(x)"])
def test_computed_include(cache, tree, operand):
    write(tree / "inc/sub/a.h", f"#include {operand}\n")
    write(tree / "inc/x.h", "#define V 1\n")
    source = '#define HDR "x.h"\n#define PICK(x) <x.h>\n#include <sub/a.h>\n' + KERNEL
    (tree / "first").mkdir()
    options = paths("first", "inc")
    agreed(cache, source, options)
    assert agreed(cache, source, options).cached
    (tree / "inc/x.h").write_text("#define V 2\n")
    assert not agreed(cache, source, options).cached
    write(tree / "inc/sub/x.h", "#define V 3\n")
    agreed(cache, source, options)
    write(tree / "first/x.h", "#define V 4\n")
    agreed(cache, source, options)


def test_a_header_included_by_its_name_and_by_a_macro(cache, tree):
    """The name explains one search of it, and not the other."""
    write(tree / "inc/sub/a.h", "#include HDR\n")
    write(tree / "inc/x.h", "#undef V\n#define V 1\n")
    source = '#include <x.h>\n#define HDR "x.h"\n#include <sub/a.h>\n' + KERNEL
    agreed(cache, source, paths("inc"))
    write(tree / "inc/sub/x.h", "#undef V\n#define V 2\n")
    assert not agreed(cache, source, paths("inc")).cached


def test_stringified_include(cache, tree):
    write(tree / "inc/sub/a.h", "#define S(x) #x\n#define T(x) S(x)\n#include T(x.h)\n")
    write(tree / "inc/x.h", "#define V 1\n")
    source = "#include <sub/a.h>\n" + KERNEL
    agreed(cache, source, paths("inc"))
    write(tree / "inc/sub/x.h", "#define V 2\n")
    assert not agreed(cache, source, paths("inc")).cached
    (tree / "inc/sub/x.h").write_text("#define V 3\n")
    assert not agreed(cache, source, paths("inc")).cached


def test_an_alias_set_by_a_pragma(cache, tree):
    write(tree / "inc/x.h", "#define V 1\n")
    target = write(tree / "inc/y.h", "#define V 2\n")
    source = '#pragma include_alias("x.h", "y.h")\n#include "x.h"\n' + KERNEL
    agreed(cache, source, paths("inc"))
    target.write_text("#define V 3\n")
    agreed(cache, source, paths("inc"))
    write(tree / "y.h", "#define V 4\n")
    agreed(cache, source, paths("inc"))


# -- one file under two names ----------------------------------------------------------------------


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("skip", ["#pragma once\n{}", "#ifndef G\n#define G\n{}#endif\n"])
def test_a_link_to_a_header_becomes_a_file_of_its_own(cache, tree, link, skip):
    first = write(tree / "inc/a/x.h", skip.format("#ifndef V\n#define V 1\n#endif\n"))
    second = tree / "inc/b/x.h"
    second.parent.mkdir()
    link(first, second)
    source = "#include <a/x.h>\n#include <b/x.h>\n" + KERNEL
    agreed(cache, source, paths("inc"))
    assert agreed(cache, source, paths("inc")).cached
    second.unlink()
    second.write_text("#undef V\n#define V 2\n")
    assert not agreed(cache, source, paths("inc")).cached
    second.write_text("#undef V\n#define V 3\n")
    assert not agreed(cache, source, paths("inc")).cached


_ONCE = "#pragma once\n#ifdef SEEN\n#define TWICE\n#endif\n#define SEEN\n"
_TWO = "#include <a/x.h>\n#include <b/x.h>\n" + _GUESS.format("defined(TWICE)") + KERNEL


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_once_a_link_becomes_a_copy(cache, tree, link):
    """`#pragma once` asks whether two names are one file, not whether the text is the same."""
    first = write(tree / "inc/a/x.h", _ONCE)
    second = tree / "inc/b/x.h"
    second.parent.mkdir()
    link(first, second)
    agreed(cache, _TWO, paths("inc"))
    second.unlink()
    shutil.copy2(first, second)
    assert not agreed(cache, _TWO, paths("inc")).cached
    second.unlink()
    link(first, second)
    assert agreed(cache, _TWO, paths("inc")).cached


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_once_a_copy_becomes_a_link(cache, tree, link):
    first = write(tree / "inc/a/x.h", _ONCE)
    second = write(tree / "inc/b/x.h", _ONCE)
    agreed(cache, _TWO, paths("inc"))
    assert agreed(cache, _TWO, paths("inc")).cached
    second.unlink()
    link(first, second)
    assert not agreed(cache, _TWO, paths("inc")).cached


def test_once_on_two_lines(cache, tree):
    text = _ONCE.replace("once", "on\\\nce")
    first = write(tree / "inc/a/x.h", text)
    second = tree / "inc/b/x.h"
    second.parent.mkdir()
    second.symlink_to(first)
    agreed(cache, _TWO, paths("inc"))
    second.unlink()
    shutil.copy2(first, second)
    assert not agreed(cache, _TWO, paths("inc")).cached


def test_once_across_linked_directories(cache, tree):
    write(tree / "real/x.h", _ONCE)
    (tree / "a").symlink_to("real")
    (tree / "b").symlink_to("real")
    agreed(cache, _TWO, paths("."))
    (tree / "b").unlink()
    shutil.copytree(tree / "real", tree / "b")
    assert not agreed(cache, _TWO, paths(".")).cached


def test_a_link_swings_to_another_directory(cache, tree):
    write(tree / "v1/x.h", "#define V 1\n")
    write(tree / "v2/x.h", "#define V 2\n")
    (tree / "current").symlink_to("v1")
    source = "#include <x.h>\n" + KERNEL
    agreed(cache, source, paths("current"))
    (tree / "new").symlink_to("v2")
    os.replace(tree / "new", tree / "current")
    assert not agreed(cache, source, paths("current")).cached
    (tree / "new").symlink_to("v1")
    os.replace(tree / "new", tree / "current")
    assert agreed(cache, source, paths("current")).cached


# -- __has_include ---------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", ["{}", "defined(NOT) || {}"])
@pytest.mark.parametrize(
    ("define", "use"),
    [
        ("", "__has_include(<y.h>)"),
        ("", '__has_include("y.h")'),
        ("#define HAS(x) __has_include(x)\n", "HAS(<y.h>)"),
        ("#define HAS __has_include\n", "HAS(<y.h>)"),
        ("#define HAS(x) __has_include(x)\n#define HAS2(x) HAS(x)\n", 'HAS2("y.h")'),
        ("#define NAME <y.h>\n", "__has_include(NAME)"),
        ("#define N(x) <x.h>\n#define HAS(x) __has_include(N(x))\n", "HAS(y)"),
        ("#define HAS(x) \\\n __has_include \\\n (x)\n", "HAS(<y.h>)"),
        ("#define S(x) #x\n#define HAS(x) __has_include(S(x))\n", "HAS(y.h)"),
        ("#define HAS(x) __has_include(<x>)\n", "HAS(y.h)"),
        ("#define HAS(x) __has_include(<x.h>)\n#define ALSO(x) HAS(x)\n", "ALSO(y)"),
        ("#define HAS(d, x) __has_include(<d/x.h>)\n", "HAS(.,y)"),
        ("#define HAS __has_include(<NAME.h>)\n#define NAME y\n", "HAS"),
        ("#define HAS __has_include\n#define NAME y\n", "HAS(<NAME.h>)"),
        ("#define HAS() __has_include\n", "HAS()(<y.h>)"),
        ("#define OPEN (\n#define HAS __has_include OPEN <y.h>)\n", "HAS"),
        ("/* one */ #define HAS(x) __has_include(<x.h>)\n", "HAS(y)"),
        ("#define HAS(x) __has_##x(<y.h>)\n", "HAS(include)"),
        ("#define GLUE(a, b) a##b\n", "GLUE(__has_, include)(<y.h>)"),
        ("#define GLUE(a, b) a##b\n", "GLUE(__has_inc, lude)(<y.h>)"),
    ],
)
def test_has_include_turns_true_and_false(cache, tree, define, use, wrap):
    write(tree / "inc/x.h", define + _GUESS.format(wrap.format(use)))
    source = "#include <x.h>\n" + KERNEL
    (tree / "first").mkdir()
    options = paths("first", "inc")
    agreed(cache, source, options)
    made = write(tree / "first/y.h", "")
    agreed(cache, source, options)
    agreed(cache, source, options)
    made.unlink()
    agreed(cache, source, options)
    made = write(tree / "inc/y.h", "")
    agreed(cache, source, options)


def test_has_include_hits_where_nothing_relevant_changes(cache, tree):
    write(tree / "inc/x.h", _GUESS.format("__has_include(<y.h>)"))
    source = "#include <x.h>\n" + KERNEL
    agreed(cache, source, paths("inc"))
    assert agreed(cache, source, paths("inc")).cached
    header = write(tree / "inc/y.h", "one")
    assert not agreed(cache, source, paths("inc")).cached
    header.write_text("two")  # exists as before
    assert agreed(cache, source, paths("inc")).cached
    header.unlink()
    assert agreed(cache, source, paths("inc")).cached


@pytest.mark.parametrize(
    ("define", "use"),
    [
        ("#define HAS(x) __has_include(<x>)\n", "HAS(y.h)"),
        ("#define HAS(d, x) __has_include(<d/x.h>)\n#define Y y\n", "HAS(sub,Y)"),
        ("#define HAS(x) (defined(__has_include) && __has_include(x))\n", "HAS(<y.h>)"),
        ("#define HAS defined __has_include\n", "HAS && __has_include(<y.h>)"),
        ("// define HAS where __has_include isn't there\n", "__has_include(<y.h>)"),
    ],
)
def test_a_macro_around_has_include_still_hits(cache, tree, define, use):
    write(tree / "inc/x.h", define + _GUESS.format(use))
    source = "#include <x.h>\n" + KERNEL
    agreed(cache, source, paths("inc"))
    assert agreed(cache, source, paths("inc")).cached
    write(tree / "inc/y.h", "")
    write(tree / "inc/sub/y.h", "")
    assert not agreed(cache, source, paths("inc")).cached
    assert agreed(cache, source, paths("inc")).cached


def test_a_has_include_is_joined_in_a_source_that_seems_to_include_nothing(cache, tree):
    write(tree / "q.h", "")
    source = "#define GLUE(a, b, c) a##b##c\n"
    source += _GUESS.format("GLUE(__has_, inc, lude)(<y.h>)") + KERNEL
    agreed(cache, source, paths("inc"))
    write(tree / "inc/y.h", "")
    agreed(cache, source, paths("inc"))


def test_has_include_in_an_option(cache, tree):
    (tree / "inc").mkdir()
    source = _GUESS.format("HAS(<y.h>)") + KERNEL
    options = paths("inc").replace(defines=["HAS(x)=__has_include(x)"])
    agreed(cache, source, options)
    write(tree / "inc/y.h", "")
    agreed(cache, source, options)


def test_has_include_in_an_option_beside_an_include(cache, tree):
    write(tree / "inc/x.h", _GUESS.format("HAS(<y.h>)"))
    source = "#include <x.h>\n" + KERNEL
    options = paths("inc").replace(defines=["HAS(x)=__has_include(x)"])
    agreed(cache, source, options)
    write(tree / "inc/y.h", "")
    agreed(cache, source, options)


def test_has_include_of_a_directory_and_of_an_unreadable_name(cache, tree):
    (tree / "inc/y.h").mkdir(parents=True)
    write(tree / "inc/x.h", _GUESS.format("__has_include(<y.h>)"))
    source = "#include <x.h>\n" + KERNEL
    agreed(cache, source, paths("inc"))
    (tree / "inc/y.h").rmdir()
    agreed(cache, source, paths("inc"))
    (tree / "inc/y.h").symlink_to("nowhere")
    agreed(cache, source, paths("inc"))
    write(tree / "inc/nowhere", "")
    agreed(cache, source, paths("inc"))


# -- what is true only after a while ---------------------------------------------------------------


@pytest.fixture
def later(monkeypatch):
    """As if everything had last been changed long ago: what is seen is trusted by its status."""
    from kcache.nvrtc import files

    monkeypatch.setattr(files, "FRESH_NS", -(10**12))


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("again", [False, True])
def test_a_directory_appears_and_later_a_header_in_it(tmp_path, cache, tree, again):
    write(tree / "second/sub/x.h", "#define V 1\n")
    (tree / "first").mkdir()
    source = "#include <sub/x.h>\n" + KERNEL
    options = paths("first", "second")
    agreed(cache, source, options)
    assert agreed(cache, source, options).cached
    (tree / "first/sub").mkdir()
    assert agreed(cache, source, options).cached
    if again:
        cache.close()
        cache = kcache.KernelCache(tmp_path / "cache")
    assert agreed(cache, source, options).cached
    write(tree / "first/sub/x.h", "#define V 2\n")
    assert not agreed(cache, source, options).cached


@pytest.mark.usefixtures("later")
def test_a_dangling_link_to_a_directory_finds_its_target(cache, tree):
    write(tree / "second/sub/x.h", "#define V 1\n")
    (tree / "first").mkdir()
    (tree / "first/sub").symlink_to(tree / "far/away")
    source = "#include <sub/x.h>\n" + KERNEL
    options = paths("first", "second")
    agreed(cache, source, options)
    assert agreed(cache, source, options).cached
    write(tree / "far/away/x.h", "#define V 2\n")
    assert not agreed(cache, source, options).cached


@pytest.mark.usefixtures("later")
def test_a_dangling_link_to_a_header_finds_its_target(cache, tree):
    write(tree / "second/x.h", "#define V 1\n")
    (tree / "first").mkdir()
    (tree / "first/x.h").symlink_to(tree / "far/x.h")
    source = "#include <x.h>\n" + KERNEL
    options = paths("first", "second")
    agreed(cache, source, options)
    assert agreed(cache, source, options).cached
    write(tree / "far/x.h", "#define V 2\n")
    assert not agreed(cache, source, options).cached


@pytest.mark.usefixtures("later")
def test_a_trusted_header_changes(cache, tree):
    header = write(tree / "inc/x.h", "#define V 1\n")
    source = "#include <x.h>\n" + KERNEL
    agreed(cache, source, paths("inc"))
    assert agreed(cache, source, paths("inc")).cached
    before = header.stat()
    os.replace(write(tree / "new.h", "#define V 2\n"), header)
    os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not agreed(cache, source, paths("inc")).cached


# -- in memory, and before the source --------------------------------------------------------------


def test_in_memory_headers_are_in_the_key(cache, tree):
    source = '#include "m.h"\n' + KERNEL
    assert not agreed(cache, source, headers={"m.h": "#define V 1\n"}).cached
    assert not agreed(cache, source, headers={"m.h": "#define V 2\n"}).cached
    assert agreed(cache, source, headers={"m.h": "#define V 1\n"}).cached


def test_an_in_memory_header_comes_before_one_on_disk(cache, tree):
    write(tree / "inc/x.h", "#define V 1\n")
    source = "#include <x.h>\n" + KERNEL
    agreed(cache, source, paths("inc"))
    assert not agreed(cache, source, paths("inc"), headers={"x.h": "#define V 2\n"}).cached
    (tree / "inc/x.h").write_text("#define V 3\n")
    assert agreed(cache, source, paths("inc"), headers={"x.h": "#define V 2\n"}).cached


@pytest.mark.parametrize("name", ["kernel.cu", "src/kernel.cu", "{tree}/src/kernel.cu"])
@pytest.mark.parametrize("memory", ["m.h", "mm/m.h", "{tree}/mm/m.h"])
def test_an_in_memory_header_includes_one_on_disk(cache, tree, name, memory):
    """Quoted names are looked for beside the in-memory name, from the working directory."""
    name, memory = name.format(tree=tree), memory.format(tree=tree)
    headers = {memory: '#include "x.h"\n'}
    source = f'#include "{memory}"\n' + KERNEL
    write(tree / "inc/x.h", "#define V 1\n")
    write(tree / "src/x.h", "#define V 5\n")
    write(tree / "src/mm/x.h", "#define V 6\n")
    agreed(cache, source, paths("inc"), headers=headers, source_name=name)
    (tree / "inc/x.h").write_text("#define V 2\n")
    agreed(cache, source, paths("inc"), headers=headers, source_name=name)
    beside = write(tree / Path(memory).parent / "x.h", "#define V 3\n")
    agreed(cache, source, paths("inc"), headers=headers, source_name=name)
    beside.write_text("#define V 4\n")
    agreed(cache, source, paths("inc"), headers=headers, source_name=name)
    again = agreed(cache, source, paths("inc"), headers=headers, source_name=name)
    assert again.cached


def test_an_in_memory_header_and_a_file_that_is_opened_under_its_name(cache, tree):
    header = write(tree / "inc/x.h", "#define V 1\n")
    source = '#include "inc/x.h"\n#include <x.h>\n' + KERNEL
    headers = {"inc/x.h": "#define W 1\n"}
    agreed(cache, source, paths("inc"), headers=headers)
    header.write_text("#define V 2\n")
    agreed(cache, source, paths("inc"), headers=headers)


@pytest.mark.parametrize(
    "text", ["#pragma once\n", "#ifndef A\n#define A\n#else\n#define W\n#endif\n"]
)
def test_names_of_in_memory_headers_become_one_file(cache, tree, text):
    """The compiler takes two texts for one, if a file has the names of both."""
    header = write(tree / "inc/x.h", "#ifndef W\n#define W 3\n#endif\n#define V W\n")
    source = '#include "a.h"\n#include "b.h"\n#include <x.h>\n' + KERNEL
    headers = {"a.h": text, "b.h": text + "#define W 2\n"}
    for _ in range(2):
        agreed(cache, source, paths("inc"), headers=headers)
    write(tree / "a.h", "")
    agreed(cache, source, paths("inc"), headers=headers)
    os.link("a.h", "b.h")
    for _ in range(2):
        agreed(cache, source, paths("inc"), headers=headers)
    os.unlink("b.h")
    assert agreed(cache, source, paths("inc"), headers=headers).cached
    # The source takes part, also under another name.
    source = "#pragma once\n" + source
    agreed(cache, source, paths("inc"), headers=headers)
    for name, other in (("a.h", "kernel.cu"), (header, "other.cu")):
        os.link(name, other)
        agreed(cache, source, paths("inc"), headers=headers, source_name=other)


@pytest.mark.parametrize("name", ["kernel.cu", "src/kernel.cu", "{tree}/src/kernel.cu"])
@pytest.mark.parametrize("option", ["-include", "--pre-include"])
def test_pre_include(cache, tree, name, option):
    """Looked for in the working directory, not in the source's, and then on the path."""
    name = name.format(tree=tree)
    header = write(tree / "inc/pre.h", "#define V 1\n")
    write(tree / "src/pre.h", "#define V 9\n") if "src" in name else None
    options = paths("inc").replace(extra_options=[option, "pre.h"])
    agreed(cache, KERNEL, options, source_name=name)
    assert agreed(cache, KERNEL, options, source_name=name).cached
    header.write_text("#define V 2\n")
    assert not agreed(cache, KERNEL, options, source_name=name).cached
    first = write(tree / "pre.h", "#define V 3\n")
    assert not agreed(cache, KERNEL, options, source_name=name).cached
    first.write_text("#define V 4\n")
    assert not agreed(cache, KERNEL, options, source_name=name).cached


# -- spelling of paths -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["inc", "inc/", "inc//", "./inc", "inc/.", "inc/../inc", " inc", "inc ", "{tree}/inc"]
)
def test_spellings_of_an_include_directory(cache, tree, path):
    write(tree / "inc/x.h", '#include "sub/y.h"\n')
    header = write(tree / "inc/sub/y.h", "#define V 1\n")
    source = '#include "x.h"\n' + KERNEL
    options = paths("first", path.format(tree=tree))
    agreed(cache, source, options)
    assert agreed(cache, source, options).cached
    header.write_text("#define V 2\n")
    assert not agreed(cache, source, options).cached
    write(tree / "first/x.h", "#define V 3\n")
    assert not agreed(cache, source, options).cached


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["-Ione//"], ["-Itwo"]),
        (["-I./one//sub/.."], ["-Itwo"]),
        (["-Ione\n"], ["-Itwo"]),
        (["-I", "one\t"], ["-Itwo"]),
        (["--include-path= one"], ["-I two"]),
        (["--include-path= one"], ["-I", " one"]),
        (["-I-", "-Ione"], ["-Itwo", "-Ione"]),
    ],
)
def test_directories_that_the_compiler_spells_in_its_own_way(cache, tree, one, other):
    for number, folder in enumerate(("one", "two", " one", "one/sub")):
        write(tree / folder / "x.h", f"#define V {number}\n")
    source = "#include <x.h>\n" + KERNEL
    for extra in (one, other, one):
        agree(cache, source, ARCH.replace(extra_options=extra))
        if extra[0].startswith("-I") and len(extra[0]) > 3:
            agree(cache, source, paths(extra[0].removeprefix("-I")))


def test_a_directory_that_begins_with_an_equals_sign(cache, tree):
    write(tree / "one/x.h", "#define V 1\n")
    write(tree / "two/x.h", "#define V 2\n")
    for folder in ("=one", "two"):
        agreed(cache, "#include <x.h>\n" + KERNEL, paths(folder))


def test_a_source_whose_name_has_two_slashes_in_a_row(cache, tree):
    for folder in ("one", "two"):
        write(tree / folder / "sub/x.h", f"#define V {ord(folder[0])}\n")
    for name in ("one//sub/k.cu", "two//sub/k.cu", "two/sub/k.cu"):
        agreed(cache, '#include "x.h"\n' + KERNEL, source_name=name)


@pytest.mark.parametrize(
    "extra",
    [
        ["-I", "inc"],
        ["-Iinc"],
        ["-I inc"],
        ["-I=inc"],
        ["--include-path=inc"],
        ["--include-path", "inc"],
        ["-I="],
        ["-I", ""],
    ],
)
def test_include_directories_in_extra_options(cache, tree, extra):
    write(tree / "x.h", '#include "inc/x.h"\n')
    header = write(tree / "inc/x.h", "#define V 1\n")
    source = "#include <x.h>\n" + KERNEL
    options = paths("first").replace(extra_options=extra)
    agreed(cache, source, options, source_name="src/kernel.cu")
    assert agreed(cache, source, options, source_name="src/kernel.cu").cached
    header.write_text("#define V 2\n")
    assert not agreed(cache, source, options, source_name="src/kernel.cu").cached
    write(tree / "first/x.h", "#define V 3\n")
    assert not agreed(cache, source, options, source_name="src/kernel.cu").cached


@pytest.mark.parametrize(
    "name", ["kernel.cu", "./kernel.cu", "src/kernel.cu", "src/../kernel.cu", "{tree}/kernel.cu"]
)
def test_spellings_of_the_source(cache, tree, name):
    name = name.format(tree=tree)
    (tree / "src").mkdir()
    header = write(tree / Path(name).parent / "sub/../x.h", "#define V 1\n")
    write(tree / Path(name).parent / "sub/y.h", '#include "../x.h"\n')
    source = '#include "sub/y.h"\n' + KERNEL
    agreed(cache, source, source_name=name)
    assert agreed(cache, source, source_name=name).cached
    header.write_text("#define V 2\n")
    assert not agreed(cache, source, source_name=name).cached


def test_an_absolute_include(cache, tree):
    header = write(tree / "far/x.h", "#define V 1\n")
    source = f'#include "{header}"\n' + KERNEL
    agreed(cache, source)
    assert agreed(cache, source).cached
    header.write_text("#define V 2\n")
    assert not agreed(cache, source).cached


@pytest.mark.parametrize(
    "name", ["with space", "quo'te", "comma,", "ünïcode", "semi;colon", "hash#0"]
)
def test_odd_names(cache, tree, name):
    header = write(tree / name / f"{name}.h", "#define V 1\n")
    source = f"#include <{name}.h>\n" + KERNEL
    agreed(cache, source, paths(name))
    assert agreed(cache, source, paths(name)).cached
    header.write_text("#define V 2\n")
    assert not agreed(cache, source, paths(name)).cached


def test_names_that_are_not_utf8(cache, tree):
    folder = os.fsdecode(b"inc-\xff")
    header = write(tree / folder / "x.h", "#define V 1\n")
    source = "#include <x.h>\n" + KERNEL
    agreed(cache, source, paths(folder))
    header.write_text("#define V 2\n")
    agreed(cache, source, paths(folder))


def test_another_working_directory(cache, tree):
    write(tree / "one/inc/x.h", "#define V 1\n")
    write(tree / "two/inc/x.h", "#define V 2\n")
    source = "#include <x.h>\n" + KERNEL
    for _ in range(2):
        for folder in ("one", "two"):
            with working_directory(tree / folder):
                agreed(cache, source, paths("inc"))


# -- macros that the options define ----------------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [
        ["-DHDR=<b.h>"],
        ["-D", "HDR=<b.h>"],
        ["-D=HDR=<b.h>"],
        ["--define-macro=HDR=<b.h>"],
        ["--define-macro", "HDR=<b.h>"],
        ["-D HDR=<b.h>"],
    ],
)
def test_an_option_names_the_header(cache, tree, extra):
    write(tree / "inc/a.h", "#define V 1\n")
    header = write(tree / "inc/b.h", "#define V 2\n")
    source = "#ifndef HDR\n#define HDR <a.h>\n#endif\n#include HDR\n" + KERNEL
    options = paths("inc").replace(extra_options=extra)
    agreed(cache, source, options)
    header.write_text("#define V 3\n")
    agreed(cache, source, options)


# -- after a failed compile ------------------------------------------------------------------------


def test_a_macro_of_a_header_names_another_after_a_failed_compile(tmp_path):
    python(
        """
        import sys
        from pathlib import Path
        import kcache
        from nvrtc.reference import *

        tree = Path(sys.argv[1])
        cache = kcache.KernelCache(tree / "cache")
        options = ARCH.replace(include_paths=[tree])
        write(tree / "bad.h", "#error no\\n")
        try:
            cache.get_or_compile("#include <bad.h>\\n" + KERNEL, options=options)
        except kcache.CompileError:
            pass
        write(tree / "config.h", "#define HDR <other.h>\\n")
        write(tree / "default.h", "#define V 1\\n")
        header = write(tree / "other.h", "#define V 2\\n")
        write(tree / "last.h", "")
        source = ("#include <config.h>\\n#ifndef HDR\\n#define HDR <default.h>\\n#endif\\n"
                  "#include HDR\\n#include <last.h>\\n" + KERNEL)
        agreed(cache, source, options)
        header.write_text("#define V 3\\n")
        agreed(cache, source, options)
        write(tree / "config.h", "")
        agreed(cache, source, options)
        """,
        tmp_path,
    )


# -- trigraphs, which C++14 and older standards replace --------------------------------------------


@pytest.mark.parametrize("std", ["c++03", "c++11", "c++14"])
@pytest.mark.parametrize("begin", ["#inc??/\nlude", "??=include", "??=inc??/\nlude"])
@pytest.mark.parametrize("where", ["source", "header", "in memory"])
def test_an_include_that_a_trigraph_hides(cache, tree, std, begin, where):
    write(tree / "inc/x.h", "#define V 1\n")
    directive = f"{begin} <x.h>\n"
    source, headers = directive + KERNEL, None
    if where == "header":
        write(tree / "inc/y.h", directive)
        source = "#include <y.h>\n" + KERNEL
    elif where == "in memory":
        headers = {"y.h": directive}
        source = "#include <y.h>\n" + KERNEL
    options = paths(tree / "inc")
    for given in (options.replace(std=std), options.replace(extra_options=[f"--std={std}"])):
        for value in (1, 2):
            write(tree / "inc/x.h", f"#define V {value}\n")
            agreed(cache, source, given, headers=headers)


def test_trigraphs_mean_nothing_to_newer_standards(cache, tree):
    source = KERNEL.replace("V", 'sizeof("what??/n")')
    for std in (None, "c++17", "c++20"):
        options = ARCH.replace(std=std)
        assert not agreed(cache, source, options).cached
        assert agreed(cache, source, options).cached
