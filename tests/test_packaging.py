"""The distribution: the content of the sdist and the wheel, and the metadata of an installation."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import EntryPoint, distribution, entry_points, version
from pathlib import Path, PurePosixPath

import pytest
from core.helpers import run
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

import kcache
from kcache.backend import open_backend
from kcache.dropin import build as dropin
from kcache.util.hints import NAME, PUBLISHED

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = {"kcache", "kcache_backends"}
# Built in a process of its own: the build backend works on the current directory.
BUILD = "import sys, hatchling.build as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def build(kind: str, source: Path, out: Path) -> Path:
    """Build an sdist or a wheel of `source` as an installer would, without isolation."""
    done = run(sys.executable, "-c", BUILD, f"build_{kind}", out, cwd=source)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


def sources(folder: Path) -> set[str]:
    """Return the paths of the files in the working tree that an installation needs."""
    kinds = {".py", ".pyi", ".typed", ".cu", ".cuh", ".css", ".html", ".c", ".h", ".map"}
    return {
        path.relative_to(folder).as_posix()
        for package in PACKAGES
        for path in (folder / package).rglob("*")
        if path.suffix in kinds or path.name == "py.typed"
    }


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def tree(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the unpacked sdist."""
    folder = tmp_path_factory.mktemp("tree")
    subprocess.run(["tar", "-x", "-f", sdist, "-C", folder], check=True)
    (tree,) = folder.iterdir()
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def sdist_names(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        files = [PurePosixPath(member.name) for member in archive if member.isfile()]
    assert {path.parts[0] for path in files} == {sdist.name.removesuffix(".tar.gz")}
    return {path.relative_to(path.parts[0]).as_posix() for path in files}


_OURS = f"kcache_cuda-{kcache.__version__}"
_CLIENT = f"{_OURS}.data/scripts/{dropin.CLIENT}"
#: Compiled into a wheel if there is a C compiler.
LIBRARIES = (
    {f"kcache/dropin/lib/{dropin.name(major)}" for major in dropin.MAJORS}
    | {f"kcache/dropin/lib/{os.uname().machine}/{dropin.name(13, 'preload')}"}
    | {f"kcache/dropin/lib/{os.uname().machine}/{dropin.RECORDER}", _CLIENT}
    if sys.platform == "linux" and dropin.compiler()
    else set[str]()
)


def test_wheel_is_named_after_the_distribution_and_the_glibc_that_it_needs(wheel: Path) -> None:
    name, version, _, tags = parse_wheel_filename(wheel.name)
    assert (name, str(version)) == ("kcache-cuda", kcache.__version__)
    assert tags <= {*sys_tags()}
    platforms = {tag.platform.rpartition("2_")[0] for tag in tags}
    assert platforms == ({"manylinux_"} if LIBRARIES else {""})


@pytest.mark.skipif(not LIBRARIES, reason="no C compiler is installed")
def test_unknown_kinds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KCACHE_WHEEL", "riscv64")
    done = run(sys.executable, "-c", BUILD, "build_wheel", tmp_path, cwd=ROOT)
    expected = "KCACHE_WHEEL: expected one of native, x86_64, aarch64, any, got riscv64"
    assert (done.returncode, done.stderr.strip()) == (1, expected)


def test_wheel_without_a_compiler_is_pure_and_holds_the_same(
    wheel_names: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel of the working tree has the files of the sdist's wheel, except compiled libraries."""
    monkeypatch.setenv("PATH", str(tmp_path))
    pure = build("wheel", ROOT, tmp_path)
    assert pure.name == f"kcache_cuda-{kcache.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(pure) as archive:
        libraries = {name for name in wheel_names if name.startswith("kcache/dropin/lib/")}
        libraries.add(_CLIENT)
        assert set(archive.namelist()) == wheel_names - libraries


def test_the_libraries_name_no_build_folder(wheel: Path, tree: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in LIBRARIES:
            assert os.fsencode(tree) not in archive.read(name)


def test_wheel_holds_every_source_and_nothing_else(wheel_names: set[str]) -> None:
    expected = sources(ROOT) | sources(ROOT / "backends")
    manual = {f"{_OURS}.data/data/share/man/man1/kcache.1"}
    assert f"{_OURS}.dist-info/licenses/LICENSE" in wheel_names
    found = {name for name in wheel_names if ".dist-info/" not in name}
    built = {name for name in found if name.startswith("kcache/dropin/lib/")} | {_CLIENT} & found
    assert found == expected | built | manual
    assert built >= LIBRARIES
    assert bool(built) == bool(LIBRARIES)


def test_sdist_holds_what_building_testing_and_reading_need(sdist_names: set[str]) -> None:
    top = {name.partition("/")[0] for name in sdist_names}
    pages = {"ARCHITECTURE.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md"}
    pages |= {"README.md", "SECURITY.md"}
    files = {"CITATION.cff", "LICENSE", "PKG-INFO", "hatch_build.py", "pyproject.toml", "tox.ini"}
    needed = pages | files | {"kcache", "backends", "tests", "docs", "examples"}
    assert needed <= top <= needed | {"bench", ".ci", ".github", ".gitignore"}
    assert not [name for name in sdist_names if name.endswith(".pyc")]


def test_version_has_one_source() -> None:
    assert version("kcache-cuda") == kcache.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.?(a|b|rc|dev)\d+)?", kcache.__version__)


def test_installation_declares_the_command_and_the_backends() -> None:
    ours = distribution("kcache-cuda").entry_points
    assert EntryPoint("kcache", "kcache.cli:main", "console_scripts") in ours
    assert entry_points(group="kcache.backends")["file"].value == "kcache_backends.file:FileBackend"


def test_every_declared_backend_opens_by_its_name(tmp_path: Path) -> None:
    names = distribution("kcache-cuda").entry_points.select(group="kcache.backends").names
    assert names == {"file", "lmdb", "zstd", "zstd+lmdb"}
    for name in names:
        factory = entry_points(group="kcache.backends")[name].load()
        for opened in (
            factory(tmp_path / name, max_size=10**6, read_only=False),
            open_backend(name, str(tmp_path / name), max_size=10**6, read_only=True),
        ):
            assert isinstance(opened, kcache.Backend)
            opened.close()


def test_extras_are_those_of_the_documentation() -> None:
    declared = PROJECT["project"]["optional-dependencies"].keys()
    users = {"all", "cli", "cu12", "cu13", "demo", "launch", "testing"}
    users |= {"http", "redis", "remote", "s3", "signing"}
    assert declared == users
    page = (ROOT / "docs" / "how-to" / "install.md").read_text(encoding="utf-8")
    assert {extra for extra in users if f"`{extra}`" not in page} == set()


def test_dependency_groups_name_no_package_of_this_project() -> None:
    """They are installed before this project is built, so pip would look for it in an index."""
    groups = PROJECT["dependency-groups"]
    assert groups.keys() == {"bench", "docs", "nvcc", "test"}
    assert [line for group in groups.values() for line in group if line.startswith("kcache")] == []


def test_classifiers_name_the_pythons_that_tox_runs() -> None:
    classifiers = PROJECT["project"]["classifiers"]
    stated = set(re.findall(r":: (3\.\d+)", "\n".join(classifiers)))
    environments = re.findall(r"^    py3(\d+)$", (ROOT / "tox.ini").read_text("utf-8"), re.M)
    assert stated <= {"3.11"} | {f"3.{minor}" for minor in environments}
    assert PROJECT["project"]["requires-python"] == ">=3.11"


def test_the_repository_has_one_address() -> None:
    """All URLs have one address, which is a reserved placeholder (RFC 2606) until publication."""
    addresses = set(PROJECT["project"]["urls"].values())
    address = min(addresses, key=len)
    assert all(each.startswith(address) for each in addresses)
    assert address.startswith("https://kcache.example/") is not PUBLISHED
    done = run("git", "grep", "-l", "--fixed-strings", address, cwd=ROOT)
    if done.returncode == 0:
        assert done.stdout.split() == ["pyproject.toml"]


def test_readme_shows_the_command_that_ci_runs() -> None:
    (command,) = re.findall(r"```sh\n(.*tox)\n```", (ROOT / "README.md").read_text("utf-8"))
    assert command in (ROOT / ".ci" / "run").read_text("utf-8").splitlines()


def test_workflows_call_what_runs_here() -> None:
    """Workflows run the documented command, and existing tox environments."""
    texts = [path.read_text("utf-8") for path in (ROOT / ".github" / "workflows").iterdir()]
    readme = (ROOT / "README.md").read_text("utf-8")
    (command,) = re.findall(r"```sh\n(.*tox)\n```", readme)
    assert any(f"run: {command}\n" in text for text in texts)
    tox = (ROOT / "tox.ini").read_text("utf-8")
    listed = re.findall(r"environment: \[(.*)\]|tox -e (\w+)", "".join(texts))
    environments = {name for pair in listed for words in pair for name in re.findall(r"\w+", words)}
    assert environments >= {"wheels"}
    assert [name for name in environments if f"[testenv:{name}]" not in tox] == []


def test_no_page_names_another_distribution() -> None:
    wrong = re.compile(r"(pip3?|uv|uvx|pipx|poetry)\s+(\w+\s+)*(-\S+\s+)*['\"]?kcache(?!-cuda)\b")
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("kcache/**/*.py")]
    assert [path for path in texts if wrong.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.skipif(PUBLISHED, reason="the project is published, so anybody may name it")
def test_nothing_installs_it_by_name() -> None:
    by_name = re.compile(rf"{NAME}\[|(pip|uv|pipx)\b[^\n`]*\binstall\b[^\n`]*\b{NAME}\b")
    folders = [ROOT / name for name in ("kcache", "backends", "docs", "examples")]
    found = [path for folder in folders for path in folder.rglob("*") if "_build" not in path.parts]
    texts = {path for path in found if path.suffix in (".py", ".md", ".txt")}
    texts |= {ROOT / "README.md", ROOT / "CONTRIBUTING.md"}
    texts -= {ROOT / "kcache" / "util" / "distribution.py"}  # which installs nothing
    assert [path for path in texts if by_name.search(path.read_text(encoding="utf-8"))] == []


def test_import_packages_are_those_that_the_linter_knows() -> None:
    assert set(PROJECT["tool"]["importlinter"]["root_packages"]) == PACKAGES
