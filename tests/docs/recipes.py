"""Recipes for machines that a test does not have: a Dockerfile, a workflow of a CI service.

Their commands run for real, in a folder. What is translated, and nothing else:

- absolute paths of an image (`/opt/kcache`) lie below a folder beside the page's own; those of the
  system (`/bin`, `/usr`, ...) stay as they are;
- `FROM`, `USER` and `uses:` have no effect; `COPY` copies from the page's folder, but for a wheel:
  what it brings is there;
- `pip`, `useradd`, `chown` and the like succeed and do nothing: see `reader.py`;
- the only expression of a workflow that a test knows is `github.workspace`.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil

from docs.pages import Block
from docs.reader import Reader, parsed

_IMAGE = re.compile(r"(?<![\w./}~-])/(?=(?:app|data|home|opt)\b)")


def follow(reader: Reader, block: Block) -> None:
    """Does what a reader does with a block, a recipe for an image or a workflow among them."""
    if "dockerfile" in block.marks:
        _dockerfile(reader, block)
    elif "workflow" in block.marks:
        _workflow(reader, block)
    else:
        reader.follow(block)


def _dockerfile(reader: Reader, block: Block) -> None:
    """Does what a Dockerfile says; raises AssertionError where a command fails."""
    root = reader.folder.with_name("image")
    root.mkdir(exist_ok=True)
    environ, reader.cwd = dict(reader.environ), root
    for line in filter(None, block.text.splitlines()):
        instruction, _, text = _IMAGE.sub(f"{root}/", line).partition(" ")
        match instruction:
            case "ENV":
                name, _, value = text.partition("=")
                reader.environ[name] = value
            case "WORKDIR":
                reader.cwd = root / text
                reader.cwd.mkdir(parents=True, exist_ok=True)
            case "COPY":
                *sources, target = text.split()
                for source in sources:
                    if not source.endswith(".whl"):
                        shutil.copy2(reader.folder / source, reader.cwd / target)
            case "RUN" | "CMD":
                cwd = reader.cwd
                reader.shell(block, shlex.join(json.loads(text)) if text[0] == "[" else text)
                reader.cwd = cwd
            case _:
                assert instruction in ("FROM", "USER"), f"{block.where}: no test knows {line}"
    reader.environ, reader.cwd = environ, reader.folder


def _workflow(reader: Reader, block: Block) -> None:
    """Runs the commands of a GitHub workflow, in order."""
    found = parsed(block)
    assert isinstance(found, dict), f"{block.where}: this is no workflow"
    for name, value in found["env"].items():
        reader.environ[name] = value.replace("${{ github.workspace }}", str(reader.folder))
        assert "${{" not in reader.environ[name], f"{block.where}: no test knows {value}"
    (job,) = found["jobs"].values()
    for step in job["steps"]:
        assert step.keys() & {"uses", "run"}, f"{block.where}: no test knows {step}"
        if "run" in step:
            reader.cwd = reader.folder
            reader.shell(block, step["run"])
