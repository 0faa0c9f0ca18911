"""Every kind of output: the second start writes the same as the first start and as nvcc alone."""

import re
from pathlib import Path

import pytest
from nvcc.conftest import Service, comparable, written

_GENCODES = (
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=[sm_90,compute_90]",
)
COMMANDS = {
    "cubin": "-cubin -arch=sm_90 k.cu -o k.cubin",
    "cubin-gencode": "-cubin -gencode=arch=compute_90a,code=sm_90a k.cu -o k.cubin",
    "ptx": "-ptx -arch=sm_90 k.cu",
    "fatbin": f"-fatbin {' '.join(_GENCODES)} k.cu -o k.fatbin",
    "fatbin-compressed": "-fatbin -arch=sm_90 -Xfatbin=-compress-all k.cu -o k.fatbin",
    "object": "-c -arch=sm_90 k.cu -o k.o",
    "object-gencodes": f"-c {' '.join(_GENCODES)} k.cu -o k.o",
    "object-threads": f"-c --threads 2 {' '.join(_GENCODES)} k.cu -o k.o",
    "object-debug": "-c -g -G -arch=sm_90 k.cu -o k.o",
    "object-lineinfo": "-c -lineinfo -arch=sm_90 k.cu -o k.o",
    "object-dependencies": "-c -MD -MF k.o.d -arch=sm_90 k.cu -o k.o",
    "object-long": "--compile --generate-dependencies-with-compile --dependency-output k.d "
    "--gpu-architecture=sm_90 k.cu --output-file k.o",
    "object-rdc": "-c -rdc=true -arch=sm_90 k.cu -o k.o",
    "device-c": "-dc -arch=sm_90 k.cu",
    "lto": "-dc -dlto -arch=sm_90 k.cu -o k.o",
    "shared": "-shared -Xcompiler -fPIC -arch=sm_90 k.cu -o libk.so",
    "program": "-arch=sm_90 k.cu main.cu -o program",
    "keep": "-cubin --keep -arch=sm_90 k.cu -o k.cubin",
    "keep-dir": "-cubin --keep --keep-dir include -arch=sm_90 k.cu -o k.cubin",
    "response": "-c -optf options.txt -arch=sm_90 k.cu -o k.o",
    "two-sources": "-c -arch=sm_90 k.cu other.cu",
    "preprocess": "-E -arch=sm_90 k.cu -o k.ii",
    "preprocess-text": "-E -arch=sm_90 k.cu",
}
#: Commands that are left to nvcc: those that only print, and those that add to an existing file.
DECLINED = {
    "version": "--version",
    "dryrun": "--dryrun -c k.cu",
    "library": "-lib -arch=sm_90 k.cu -o libk.a",
    "native": "-c -arch=native k.cu",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", [*COMMANDS.values()], ids=[*COMMANDS])
def test_a_second_start_writes_the_same(command: str, service: Service, project: Path) -> None:
    (project / "main.cu").write_text("int main() { return 0; }\n")
    arguments = ["-Iinclude", *command.split()]
    before = written(project)
    first = service.run(*arguments, cwd=project)
    assert first.returncode == 0, first.stderr
    made = written(project)
    assert made.keys() > before.keys() or first.stdout
    for name in made.keys() - before.keys():
        (project / name).unlink()
    second = service.run(*arguments, cwd=project)
    assert written(project) == made
    assert (second.returncode, second.stdout, second.stderr) == (0, first.stdout, first.stderr)
    assert service.counts["hits"] == 1
    names = made.keys() - before.keys()
    first_alone, alone = (
        made_alone(service, project, arguments),
        made_alone(service, project, arguments),
    )
    assert alone.keys() == {name: made[name] for name in names}.keys()
    assert {name: mode for name, (mode, _) in alone.items()} == {
        name: made[name][0] for name in names
    }
    for name in names:
        if comparable(first_alone[name][1]) == comparable(alone[name][1]):  # not with -G
            assert comparable(made[name][1]) == comparable(alone[name][1]), name


def made_alone(
    service: Service, project: Path, arguments: list[str]
) -> dict[str, tuple[int, bytes]]:
    """Run nvcc alone, and return the files that it writes."""
    there = {"include/header.h", "k.cu", "other.cu", "main.cu", "options.txt"}
    for name in written(project).keys() - there:
        (project / name).unlink()
    assert service.alone(*arguments, cwd=project).returncode == 0
    return {name: file for name, file in written(project).items() if name not in there}


@pytest.mark.parametrize("command", [*DECLINED.values()], ids=[*DECLINED])
def test_other_commands_are_left_to_nvcc(command: str, service: Service, project: Path) -> None:
    arguments = ["-Iinclude", *command.split()]
    first, alone = service.run(*arguments, cwd=project), service.alone(*arguments, cwd=project)
    made_up = [re.sub(rb"tmpxft_\w+", b"", text) for text in (first.stdout, first.stderr)]
    assert [first.returncode, *made_up] == [
        alone.returncode,
        *(re.sub(rb"tmpxft_\w+", b"", text) for text in (alone.stdout, alone.stderr)),
    ]
    assert service.counts["misses"] == 0
