"""The same command in another directory is a hit, unless the outputs show their directory."""

import os
import shutil
from pathlib import Path

import pytest
from nvcc.conftest import Service, comparable, write_project, written

pytestmark = pytest.mark.slow

PLAIN = """\
#include "../include/header.h"
extern "C" __global__ void kernel(int* p) { p[threadIdx.x] *= FACTOR; }
"""
INTERNAL = PLAIN + "static __device__ int counter; __global__ void other() { counter++; }\n"
ASSERTS = "#include <cassert>\n" + PLAIN.replace("{ p", "{ assert(p); p")
HOST_FILE = PLAIN + "const char* where() { return __FILE__; }\n"
#: A kernel in which the letters of the path are spread over single instructions.
HIDDEN = (
    PLAIN
    + """
#include <cstring>
extern "C" __global__ void hidden(char* p) {
    char name[] = __FILE__;
    for (int i = 0; i < sizeof name; i++) p[i] = name[(i * 7 + threadIdx.x) % sizeof name];
}
"""
)
HIDDEN_ON_HOST = (
    PLAIN + "#include <cstring>\nvoid put(char* p) { memcpy(p, __FILE__, sizeof __FILE__); }\n"
)
BUILTIN = (
    PLAIN + "const char* where(const char* f = __builtin_FILE()) { return f; }\nauto w = where();\n"
)


def place(tmp_path: Path, name: str, source: str) -> Path:
    """Make a working directory with a folder for one kernel, as DeepGEMM does."""
    folder = tmp_path / name / "tmp"
    write_project(folder)
    (folder / f"id-{name}").mkdir()
    (folder / f"id-{name}/kernel.cu").write_text(source)
    return folder


def compile_in(service: Service, folder: Path, *options: str, suffix: str = "cubin") -> bytes:
    below = next(folder.glob("id-*"))
    output = below / f"kernel.{suffix}"
    output.unlink(missing_ok=True)
    arguments = (below / "kernel.cu", "-o", output, "-arch=sm_90", f"-I{folder}/include", *options)
    done = service.run(*arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return output.read_bytes()


CASES = {
    "cubin": (PLAIN, ["-cubin"], 1),
    "ptx": (PLAIN, ["-ptx"], 1),
    "fatbin": (PLAIN, ["-fatbin", "-Xfatbin=-compress-all"], 1),
    "object": (PLAIN, ["-c"], 1),
    "shared": (PLAIN, ["-shared", "-Xcompiler", "-fPIC"], 1),
    "internal names": (INTERNAL, ["-c"], 1),
    "a path in device code": (ASSERTS, ["-cubin"], 0),
    "a path in compressed device code": (ASSERTS, ["-c", "-Xfatbin=-compress-all"], 0),
    "a path in PTX": (ASSERTS, ["-ptx"], 0),
    "a path in host code": (HOST_FILE, ["-c"], 0),
    "a hidden path in device code": (HIDDEN, ["-cubin"], 0),
    "a hidden path in PTX": (HIDDEN, ["-ptx"], 0),
    "a hidden path in host code": (HIDDEN_ON_HOST, ["-c", "-O3"], 0),
    "a path that a function returns": (BUILTIN, ["-c"], 0),
    "a path in a kept text": (PLAIN, ["-cubin", "--keep"], 0),
    "lines": (PLAIN, ["-cubin", "-lineinfo"], 0),
    "debug": (PLAIN, ["-c", "-g", "-G"], 0),
    "compressed debug": (PLAIN, ["-c", "-g", "-Xcompiler", "-gz"], 0),
    "objects to be linked": (PLAIN, ["-dc"], 0),
    "rdc": (PLAIN, ["-c", "-rdc=true"], 0),
}


@pytest.mark.parametrize(("source", "options", "hits"), [*CASES.values()], ids=[*CASES])
def test_another_place_hits_if_nothing_shows(
    source: str, options: list[str], hits: int, service: Service, tmp_path: Path
) -> None:
    one, other = place(tmp_path, "one", source), place(tmp_path, "another", source)
    first = compile_in(service, one, *options)
    service.restart()
    second = compile_in(service, other, *options)
    assert service.counts["hits"] == hits
    assert not hits or second == first
    alone = next(other.glob("id-*"))
    service.alone(
        *(alone / "kernel.cu", "-o", tmp_path / "alone", "-arch=sm_90", f"-I{other}/include"),
        *options,
        cwd=other,
    )
    if "-g" not in options:  # nvcc alone never repeats these
        assert comparable(second) == comparable((tmp_path / "alone").read_bytes())


def test_many_sources_of_one_command_hit_in_other_places(service: Service, tmp_path: Path) -> None:
    """The commands of hundreds of kernels of DeepGEMM differ only in random names of folders."""
    sources = [PLAIN.replace("FACTOR", str(number)) for number in range(10)]
    made = [
        compile_in(service, place(tmp_path, f"first-{number}", source), "-ptx", suffix="ptx")
        for number, source in enumerate(sources)
    ]
    service.restart()
    again = [
        compile_in(service, place(tmp_path, f"second-{number}", source), "-ptx", suffix="ptx")
        for number, source in enumerate(sources)
    ]
    assert again == made
    assert service.counts["hits"] == len(sources)


LINES = {
    "cubin": (PLAIN, ["-cubin"], 1),
    "ptx": (PLAIN, ["-ptx"], 1),
    "object": (PLAIN, ["-c"], 0),
    "a path": (ASSERTS, ["-cubin"], 0),
    "debug": (PLAIN, ["-cubin", "-G"], 0),
}


@pytest.mark.parametrize(("source", "options", "hits"), [*LINES.values()], ids=[*LINES])
def test_line_tables_name_the_directory_of_their_own_place(
    source: str, options: list[str], hits: int, service: Service, tmp_path: Path
) -> None:
    """The test uses names of equal length, like TileLang's random directories."""
    for name in ("one", "two"):
        folder = place(tmp_path, name, source)
        (kernel,) = folder.glob("id-*/kernel.cu")
        os.utime(kernel, (1, 1))  # a line table also has the time of the source
        made = compile_in(service, folder, "-lineinfo", *options)
    assert service.counts["hits"] == hits
    assert b"id-one" not in made
    output = tmp_path / "alone"
    arguments = (kernel, "-o", output, "-arch=sm_90", f"-I{folder}/include", "-lineinfo")
    assert service.alone(*arguments, *options, cwd=folder).returncode == 0
    if "-G" not in options:  # nvcc alone never repeats these
        assert comparable(made) == comparable(output.read_bytes())


def test_a_text_of_the_program_is_no_line_table(service: Service, tmp_path: Path) -> None:
    """A string literal that names the directory of the first compile is left as it is."""
    text = f'"{tmp_path}/on" "e/tmp/id-on" "e/data"'
    source = (
        PLAIN + "struct Named { void (*function)(); char name[1000]; };\n"
        "__device__ void nothing() {}\n"
        f"__device__ Named named = {{nothing, {text}}};\n"
        'extern "C" __global__ void copy(Named* p) { *p = named; }\n'
    )
    for name in ("one", "two"):
        made = compile_in(service, place(tmp_path, name, source), "-cubin", "-lineinfo")
        assert f"{tmp_path}/one/tmp/id-one/data".encode() in made


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["-E"], '__device__ char* made = "WHERE";'),
        (["-E", "-o", "k.txt"], '__device__ char* made = "WHERE";'),
        (["-cubin", "-o", "k.cubin"], "#warning made in WHERE"),
    ],
)
def test_a_directory_that_a_source_spells_stays(
    options: list[str], line: str, service: Service, tmp_path: Path
) -> None:
    source = line.replace("WHERE", f"{tmp_path}/one") + "\n"
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "k.cu").write_text(source)
        made, alone = (
            (by("k.cu", *options, cwd=folder), written(folder))
            for by in (service.run, service.alone)
        )
        assert made[0].stdout == alone[0].stdout
        assert made[0].stderr == alone[0].stderr
        assert made[1] == alone[1]


ABOVE = '#include "SPELLED/header.h"\n' + PLAIN.partition("\n")[2]


@pytest.mark.parametrize("spelled", ["src", "absolute"])
def test_a_header_is_found_where_its_name_leads(
    spelled: str, service: Service, tmp_path: Path
) -> None:
    """A relative name leads to a header of the new place, an absolute one to the same file."""
    first, second = tmp_path / "one", tmp_path / "another"
    name = str(first / "src") if spelled == "absolute" else "src"
    for source, factor in ((first / "src", 3), (second, 3), (second / "src", 5)):
        source.mkdir(parents=True)
        (source / "k.cu").write_text(ABOVE.replace("SPELLED", name))
        (source / "header.h").write_text(f"#define FACTOR {factor}\n")
    options = ("-ptx", "-arch=sm_90", "-I.", "-o", tmp_path / "k.ptx")
    made = []
    for folder, source in ((first, first / "src"), (second, second)):
        if spelled == "absolute" and folder == second:
            (first / "src/header.h").write_text("#define FACTOR 7\n")
        for by in (service.run, service.alone):
            assert by(*options, source / "k.cu", cwd=folder).returncode == 0
            made.append((tmp_path / "k.ptx").read_bytes())
    assert made[0] == made[1]
    assert made[2] == made[3] != made[0]


def test_a_place_behind_a_link_hits(service: Service, tmp_path: Path) -> None:
    """Compilers open headers by their real paths, even if the source is given by a link."""
    for name in ("one", "another"):
        (tmp_path / f"real-{name}").mkdir()
        (tmp_path / name).symlink_to(f"real-{name}")
        (kernel,) = place(tmp_path, name, PLAIN).glob("id-*/kernel.cu")
        arguments = ("-cubin", "-arch=sm_90", kernel, "-o", kernel.with_suffix(".cubin"))
        assert service.run(*arguments, cwd=tmp_path).returncode == 0
    assert service.counts["hits"] == 1


def test_relocation_off_binds_everything_to_its_place(service: Service, tmp_path: Path) -> None:
    service.restart(KCACHE_RELOCATION="off")
    for name in ("one", "another"):
        compile_in(service, place(tmp_path, name, PLAIN), "-cubin")
    assert service.counts["hits"] == 0


@pytest.mark.parametrize(("name", "hits"), [("kernel.cu", 1), ("{}/kernel.cu", 0)])
def test_a_source_that_asks_for_its_name_shows_no_more_than_that(
    name: str, hits: int, service: Service, tmp_path: Path
) -> None:
    """SGLang does this with `<source_location>` and a relative name in a random directory."""
    made = []
    for place in ("one", "another"):
        folder = tmp_path / place
        folder.mkdir()
        (folder / "kernel.cu").write_text("#include <source_location>\n" + BUILTIN)
        (tmp_path / "include").mkdir(exist_ok=True)
        (tmp_path / "include/header.h").write_text("#define FACTOR 3\n")
        arguments = ("-c", "-std=c++20", "-arch=sm_90", name.format(folder), "-o", "kernel.o")
        assert service.run(*arguments, cwd=folder).returncode == 0
        made.append((folder / "kernel.o").read_bytes())
        service.alone(*arguments[:-1], "alone.o", cwd=folder)
        alone = (folder / "alone.o").read_bytes()
        assert comparable(made[-1]) == comparable(alone)
    assert service.counts["hits"] == hits


def test_a_list_of_dependencies_names_the_files_of_its_own_place(
    service: Service, tmp_path: Path
) -> None:
    one, other = place(tmp_path, "one", PLAIN), place(tmp_path, "another", PLAIN)
    for folder in (one, other):
        compile_in(service, folder, "-c", "-MD", "-MF", f"{folder}/kernel.d")
    assert service.counts["hits"] == 1
    told = (other / "kernel.d").read_text()
    assert str(one) not in told
    mine = (one / "kernel.d").read_text()
    assert told == mine.replace(str(one), str(other)).replace("id-one", "id-another")


def test_objects_from_one_entry_can_be_linked_together(service: Service, tmp_path: Path) -> None:
    """Two equal objects can be linked, as two copies of one file can be without a cache."""
    source = INTERNAL.replace("kernel", "NAME").replace("other", "NAME2")
    objects = []
    for name in ("one", "another"):
        folder = place(tmp_path, name, source)
        compile_in(service, folder, "-c", "-DNAME=kernel", "-DNAME2=other", suffix="o")
        objects.append(next(folder.glob("id-*/kernel.o")))
    assert service.counts["hits"] == 1
    options = ("-shared", "-Xlinker", "--allow-multiple-definition", "-arch=sm_90")
    done = service.alone(*options, *objects, "-o", tmp_path / "lib.so", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_rdc_objects_of_two_places_link(service: Service, tmp_path: Path) -> None:
    objects = []
    for name in ("one", "another"):
        folder = place(tmp_path, name, "static __device__ int counter;\n#ifdef K\n#endif\n"
                       "static __global__ void kernel() { counter++; }\n"
                       "void* take_NAME() { return (void*)kernel; }\n".replace("NAME", "x"))  # fmt: skip
        compile_in(service, folder, "-dc", "-Xcompiler", "-fPIC", suffix="o")
        objects.append(next(folder.glob("id-*/kernel.o")))
    options = ("-shared", "-Xlinker", "--allow-multiple-definition", "-arch=sm_90")
    done = service.alone(*options, *objects, "-o", tmp_path / "lib.so", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_tree_that_was_moved_as_a_whole_hits(service: Service, tmp_path: Path) -> None:
    one = place(tmp_path, "one", PLAIN)
    compile_in(service, one, "-cubin")
    shutil.move(tmp_path / "one", tmp_path / "moved")
    moved = tmp_path / "moved/tmp"
    before = written(moved)
    compile_in(service, moved, "-cubin")
    assert service.counts["hits"] == 1
    assert written(moved) == before
