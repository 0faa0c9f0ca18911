"""Recipes for machines that a test does not have: a Dockerfile, a workflow of a CI service.

Their commands run for real, in a folder. What is translated, and nothing else:

- absolute paths of an image (`/opt/kcache`) lie below that folder, beside the page's own; those of
  the system (`/dev`, `/bin`, `/usr`, ...) stay as they are;
- `FROM`, `USER`, `EXPOSE`, `LABEL`, `VOLUME`, `SHELL` and `uses:` have no effect; `COPY` and `ADD`
  copy from the page's folder, or from an earlier stage, which is the same folder here;
- a wheel is not copied: what it brings is there;
- a cache mount of `RUN` is a folder;
- `pip`, `apt-get`, `docker`, `useradd`, `chown` and the like succeed and do nothing: see `reader.py`;
- expressions of a workflow are the ones in `_EXPRESSIONS`; any other is refused.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from docs.pages import Block
from docs.reader import Reader, parsed

_INERT = ("FROM", "USER", "EXPOSE", "LABEL", "VOLUME", "SHELL", "STOPSIGNAL", "MAINTAINER")
_IMAGE = re.compile(
    r"(?<![\w./}~-])/(?=(?:app|cache|data|etc/kcache|home|opt|root|src|srv|var|work)\b)"
)
_MOUNT = re.compile(r"--mount=\S*?(?:target|dst|destination)=([^,\s]+)\S*")
_FLAGS = re.compile(r"^(?:--\S+\s+)+")

_EXPRESSIONS = {
    "github.workspace": "{folder}",
    "github.sha": "0" * 40,
    "github.run_id": "1",
    "github.ref_name": "main",
    "runner.temp": "{folder}/temp",
    "runner.os": "Linux",
    "runner.arch": "X64",
}
_USES = re.compile(r"[\w.-]+/[\w./-]+@[\w.-]+")


# -- images --------------------------------------------------------------------------------------


def follow(reader: Reader, block: Block) -> None:
    """Does what a reader does with a block, a recipe for an image or a workflow among them."""
    if "dockerfile" in block.marks:
        follow_dockerfile(reader, block)
    elif "workflow" in block.marks:
        follow_workflow(reader, block)
    else:
        reader.follow(block)


def follow_dockerfile(reader: Reader, block: Block) -> None:
    """Does what a Dockerfile says; raises AssertionError where a command fails."""
    root = reader.folder.with_name("image")
    root.mkdir(exist_ok=True)
    environ, reader.cwd, ran = dict(reader.environ), root, 0
    for instruction, rest in _instructions(block):
        text = _IMAGE.sub(f"{root}/", rest)
        if instruction in ("ENV", "ARG"):
            reader.environ |= dict(_settings(text))
        elif instruction == "WORKDIR":
            reader.cwd = root / text
            reader.cwd.mkdir(parents=True, exist_ok=True)
        elif instruction in ("COPY", "ADD"):
            _copy(block, reader, root, text)
        elif instruction in ("RUN", "CMD", "ENTRYPOINT"):
            for mount in _MOUNT.findall(text):
                Path(mount).mkdir(parents=True, exist_ok=True)
            cwd = reader.cwd
            reader.shell(block, _command(_FLAGS.sub("", text)))
            reader.cwd = cwd
            ran += 1
        else:
            assert instruction in _INERT, f"{block.where}: no test knows {instruction}"
    assert ran, f"{block.where}: nothing in it is run"
    reader.environ, reader.cwd = environ, reader.folder


def _instructions(block: Block) -> Iterator[tuple[str, str]]:
    text = "\n".join(line for line in block.text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.strip():
            instruction, _, rest = line.strip().partition(" ")
            yield instruction.upper(), rest.strip()


def _settings(text: str) -> Iterator[tuple[str, str]]:
    for word in shlex.split(text):
        name, equals, value = word.partition("=")
        if equals:
            yield name, value


def _command(text: str) -> str:
    if text.startswith("["):
        return shlex.join(json.loads(text))
    return text


def _copy(block: Block, reader: Reader, root: Path, text: str) -> None:
    words = shlex.split(text)
    staged = any(word.startswith("--from=") for word in words)
    *sources, target = [word for word in words if not word.startswith("--")]
    into = reader.cwd / target
    for source in sources:
        if source.endswith(".whl"):  # its contents are installed here
            continue
        found = (root if staged else reader.folder) / source
        assert found.exists(), f"{block.where}: COPY: there is no {source}"
        if staged and found == into:  # all stages share one folder
            continue
        if found.is_dir():
            unwanted = shutil.ignore_patterns(".venv")
            shutil.copytree(found, into, dirs_exist_ok=True, ignore=unwanted)
        else:
            folder = target.endswith(("/", ".")) or into.is_dir()
            (into if folder else into.parent).mkdir(parents=True, exist_ok=True)
            shutil.copy2(found, into)


# -- workflows -----------------------------------------------------------------------------------


def follow_workflow(reader: Reader, block: Block) -> None:
    """Runs the commands of a GitHub workflow, in order."""
    found = parsed(block)
    assert isinstance(found, dict), f"{block.where}: this is no workflow"
    (reader.folder / "temp").mkdir(exist_ok=True)
    reader.environ |= {"CI": "true", "GITHUB_STEP_SUMMARY": str(reader.folder / "temp" / "summary")}
    _set(reader, found.get("env"))
    ran = 0
    for job in found["jobs"].values():
        _set(reader, job.get("env"))
        for step in job["steps"]:
            if "uses" in step:
                assert _USES.fullmatch(step["uses"]), f"{block.where}: {step['uses']!r}"
                continue
            before = dict(reader.environ)
            _set(reader, step.get("env"))
            reader.cwd = reader.folder / step.get("working-directory", "")
            reader.shell(block, _evaluated(reader, step["run"]))
            reader.environ = before
            ran += 1
    assert ran, f"{block.where}: nothing in it is run"


def _set(reader: Reader, settings: dict[str, object] | None) -> None:
    for name, value in (settings or {}).items():
        reader.environ[name] = _evaluated(reader, str(value))


def _evaluated(reader: Reader, text: str) -> str:
    def value(found: re.Match[str]) -> str:
        known = _EXPRESSIONS.get(found[1])
        assert known is not None, f"no test knows the expression {found[1]}"
        return known.format(folder=reader.folder)

    return re.sub(r"\$\{\{\s*(.*?)\s*\}\}", value, _IMAGE.sub(f"{reader.folder}/", text))
