"""Real users of NVRTC under `kcache run` get the same results; a second run compiles nothing."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from docs.pages import DOCS, blocks
from docs.reader import Reader
from dropin.conftest import CLIENTS, KCACHE, Dropin, Told, compile_linked, is_there, needs

from kcache.dropin import run_environment as env

#: Maps programs in Python to the module that they need.
MODULES = {
    "bindings": "cuda.bindings",
    "cupy_compiler": "cupy",  # the program compiles an empty source, too
    "numba_compile": "numba_cuda",
    "tvm_compile": "tvm",
}


def test_the_second_time_all_hit(real: Path, dropin: Dropin, include: Path) -> None:
    """Programs that run a second time hit. After an edit of the header, all are compiled again."""
    names = [name for name, module in MODULES.items() if is_there(module)]
    clients = [f"{sys.executable} {CLIENTS / name}.py {include}" for name in names]
    loaded = f"{sys.executable} {CLIENTS / 'forms.py'} {include} {real.name}"  # as torch loads it
    clients.append(f"LD_LIBRARY_PATH={real.parent} {loaded}")
    tags = ("--enable-new-dtags", "--disable-new-dtags")
    made = [compile_linked(real, "linked.c", dropin.folder / t, f"-Wl,{t}") for t in tags]
    clients += [f"{program} {include}" for program in made]
    command = ("sh", "-ec", "\n".join(clients))
    empty = "cupy_compiler" in names
    compiles = len(clients) + empty - 1  # the two linked programs have the same source

    first, second = dropin.same(*command), dropin.run(*command)
    assert (first.code, second.output) == (0, first.output), first.errors + second.errors
    assert (first.hits, first.misses) == (1, compiles), first.line
    assert (second.hits, second.misses) == (1 + compiles, 0), second.line
    assert "uncacheable 0" in second.line

    (include / "scale.h").write_text("#define SCALE 3\n")
    third = dropin.same(*command)
    assert third.output != first.output
    assert (third.hits, third.misses) == (1 + empty, compiles - empty), third.line


@pytest.mark.gpu
@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_frameworks_compute_the_same(
    framework: str, nvrtc: tuple[int, int], dropin: Dropin, include: Path
) -> None:
    needs(framework)
    # The frameworks' own caches would answer in the second run.
    dropin.environment |= {"CUPY_CACHE_IN_MEMORY": "1", "USE_PYTORCH_KERNEL_CACHE": "0"}
    command = (sys.executable, "-W", "ignore", CLIENTS / f"{framework}_kernels.py", include)
    first = dropin.same(*command)
    assert first.code == 0, first.errors
    assert first.misses >= 5, first.line
    second = dropin.run(*command)
    assert second.output == first.output
    assert (second.hits, second.misses) == (first.hits + first.misses, 0), second.line
    if framework == "cupy":
        (include / "scale.h").write_text("#define SCALE 3\n")
        assert dropin.same(*command).misses == 1


def test_the_page_about_cuda_core(nvrtc: tuple[int, int], dropin: Dropin, tmp_path: Path) -> None:
    needs("cuda.core")
    pytest.importorskip("click", reason="the extra cli is not installed")
    reader = Reader(tmp_path)
    reader.environ |= {"XDG_RUNTIME_DIR": str(dropin.runtime), env.LIBRARIES: dropin.libraries}
    try:
        for block in blocks(DOCS / "how-to" / "use-with.md"):
            if "compile_axpy.py" in (block.file, *block.text.split()):
                reader.follow(block)
    finally:
        reader.close()


def test_kcache_install(nvrtc: tuple[int, int], dropin: Dropin, include: Path) -> None:
    needs("cuda.bindings")
    client = (CLIENTS / "bindings.py").read_text()
    script = dropin.folder / "installed.py"
    script.write_text(f"import kcache\nkcache.install()\nkcache.install()\n{client}")
    wanted = dropin.bare(sys.executable, CLIENTS / "bindings.py", include)
    first = dropin.bare(sys.executable, script, include)
    second = dropin.bare(sys.executable, script, include, NVRTC_CALLED="")
    assert first.output == second.output == wanted.output, second.errors
    counts = dropin.bare(sys.executable, "-m", "kcache", "stats", "--json")
    assert '"hits": 1' in counts.output
    assert '"misses": 1' in counts.output


def test_a_failed_install(nvrtc: tuple[int, int], dropin: Dropin, include: Path) -> None:
    needs("cuda.bindings")
    client = (CLIENTS / "bindings.py").read_text()
    script = dropin.folder / "failed.py"
    attempt = (
        "import sys, kcache\n"
        "good = sys.executable\n"
        "for sys.executable in None, '', '/bin/false', '/nonexistent':\n"
        "    try:\n        kcache.install()\n"
        "    except kcache.DropinError as error:\n        print(error, file=sys.stderr)\n"
        "sys.executable = good\n"
    )
    script.write_text(attempt + client)
    wanted = dropin.bare(sys.executable, CLIENTS / "bindings.py", include)
    told = dropin.bare(sys.executable, script, include)
    assert told.output == wanted.output, told.errors
    assert told.errors.count("kcache's server can't be started") == 4
    assert not list(dropin.runtime.glob("kcache-*/*"))


def test_a_late_kcache_install_raises(nvrtc: tuple[int, int], dropin: Dropin) -> None:
    needs("cuda.bindings")
    code = "from cuda.bindings import nvrtc; nvrtc.nvrtcVersion(); import kcache; kcache.install()"
    told = dropin.bare(sys.executable, "-c", code)
    assert "DropinError: kcache.install() comes too late: " in told.errors


def test_ways_to_open_it(real: Path, dropin: Dropin) -> None:
    """Every way to open NVRTC has the same result as without, even with an empty environment."""
    opens = f"{sys.executable} {CLIENTS / 'opens.py'} {real}"
    ways = (
        f"LD_LIBRARY_PATH={path} {opens} {how}"
        for path in ("", real.parent)
        for how in ("", "clears")
    )
    assert dropin.same("sh", "-ec", "\n".join(ways)).code == 0


# -- recorded runs ---------------------------------------------------------------------------------

#: The setting with which a program fails at its first unknown kernel.
STRICT = {"KCACHE_ON_MISS": "error"}


@pytest.fixture(
    params=["cupy", pytest.param("cuda.core", marks=pytest.mark.long), pytest.param(None, id="c")]
)
def command(request: pytest.FixtureRequest, include: Path) -> Sequence[object]:
    """The command of a program that uses CuPy's compiler, one that uses cuda.core, and one in C."""
    if request.param is None:
        return request.getfixturevalue("linked"), include
    needs(request.param)
    client = "core.py" if request.param == "cuda.core" else "cupy_compiler.py"
    return sys.executable, CLIENTS / client, include


def test_a_recorded_list_suffices(command: Sequence[object], dropin: Dropin, include: Path) -> None:
    def kcache(*arguments: str, **more: str) -> Told:
        return dropin.bare(*KCACHE, *arguments, **more)

    recorded = kcache("run", "--record", "list.jsonl", *map(str, command))
    assert recorded.output == dropin.bare(*command).output

    new = {"KCACHE_DIR": str(dropin.folder / "new")}
    check = kcache("warm", "list.jsonl", "--check", "--json", **new)
    assert check.code == 1
    assert json.loads(check.output)["missing"] > 0
    refused = dropin.run(*command, **STRICT, **new)
    assert refused.code != 0
    assert (refused.hits, refused.misses) == (0, 0), refused.line

    assert kcache("warm", "list.jsonl", **new).code == 0
    assert kcache("warm", "list.jsonl", "--check", **new).code == 0
    told = dropin.run(*command, **STRICT, **new)
    assert (told.code, told.output) == (0, recorded.output)

    (include / "scale.h").write_text("#define SCALE 3\n")
    assert kcache("warm", "list.jsonl", "--check", **new).code == 1
    assert dropin.run(*command, **STRICT, **new).code != 0


def test_the_log_has_the_reason(nvrtc: tuple[int, int], dropin: Dropin, include: Path) -> None:
    needs("cuda.core")
    command = (sys.executable, CLIENTS / "core.py", include)
    dropin.run(*command)
    header = include / "scale.h"
    header.write_text("#define SCALE 3\n")
    told = dropin.run(*command, **STRICT)
    assert "NVRTC_ERROR_COMPILATION" in told.errors
    what = "scale<float> is not in the cache, and KCACHE_ON_MISS=error allows no compile"
    assert f"kcache: {what}: the header {header} changed\n" in told.errors


def test_on_miss_error_refuses_uncacheable_programs(
    nvrtc: tuple[int, int], dropin: Dropin, include: Path, tmp_path: Path
) -> None:
    """With `KCACHE_ON_MISS=error`, a compile that can't be cached fails (a source not in UTF-8)."""
    needs("cuda.bindings")
    code = (
        "from cuda.bindings import nvrtc\n"
        "_, program = nvrtc.nvrtcCreateProgram(b'// \\xff', b'k.cu', 0, [], [])\n"
        "print(int(nvrtc.nvrtcCompileProgram(program, 0, [])[0]))\n"
        "log = b' ' * nvrtc.nvrtcGetProgramLogSize(program)[1]\n"
        "nvrtc.nvrtcGetProgramLog(program, log); print(log.decode())\n"
    )
    command = (sys.executable, "-c", code)
    assert dropin.run(*command).output.startswith("0\n")
    told = dropin.run(*command, **STRICT)
    assert told.output.startswith("6\nkcache: the cache can't answer this program, and KCACHE_ON")
    assert "not UTF-8" in told.output


def test_each_compile_is_explained(nvrtc: tuple[int, int], dropin: Dropin, include: Path) -> None:
    """Each compile is explained, with `--why` as with `KCACHE_LOG=debug`."""
    needs("cuda.bindings")
    command = (sys.executable, CLIENTS / "bindings.py", include)
    header = include / "scale.h"

    def line(*options: str, **variables: str) -> tuple[str, str]:
        told = dropin.bare(*KCACHE, "run", *options, *command, **variables)
        found = re.findall(r"(?im)^kcache: debug: ((?:hit|miss): .*)$", told.errors)
        assert len(found) == 1, told.errors
        return found[0], told.output

    output = dropin.bare(*command).output
    text = "miss: scale.cu: scale<float> is compiled: no similar kernel was ever in this cache"
    assert line("--why") == (text, output)
    assert line(KCACHE_LOG="debug") == ("hit: scale.cu: scale<float>", output)
    header.write_text("#define SCALE 3\n")
    output = dropin.bare(*command).output
    text = f"miss: scale.cu: scale<float> is compiled: the header {header} changed"
    assert line(KCACHE_LOG="debug") == (text, output)
